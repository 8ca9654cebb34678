#!/bin/bash
#SBATCH --job-name=my-task
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=1
#SBATCH --mem-per-cpu=4096M
#SBATCH --time=0:30:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# 120 s before the time limit, or at `scancel --signal=TERM JOB`, the tasks save and end with exit code 75.
# Do not kill the remaining tasks when the first one ends: they may still be saving.
srun --cpus-per-task=1 --kill-on-bad-exit=0 --wait=0 --label python -m tfdist.train --config=my_task/config.py --workdir=runs/my_task --config.cluster.workers=2
code=$?
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
