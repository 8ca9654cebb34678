"""The script that runs a training under Slurm: `tfdist cluster emit --target=slurm`. No TensorFlow here."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from tfdist.cluster.jobs.job import Job, check, command, tasks
from tfdist.config import TrainConfig
from tfdist.runtime.end.process_end import PREEMPTED


def script(config: TrainConfig, workdir: pathlib.PurePath | str, arguments: Sequence[str], job: Job) -> str:
    """Returns an sbatch script.

    Args:
        config: The configuration of the run.
        workdir: The folder of the results, which all nodes share, or its URL.
        arguments: The flags of `tfdist train` for `config` and `workdir`.
        job: The resources and names.

    Raises:
        ConfigError: `job` is invalid, or the configuration names a cluster; the error lists every problem.
    """
    fault = ""
    if job.notice < config.grace_seconds:
        fault = f"notice must be grace_seconds, {config.grace_seconds:g} s, or more, in which tasks save. Received: {job.notice}."
    check(config, job, fault)
    options = [
        f"--job-name={job.name}",
        f"--ntasks={tasks(config)}",
        f"--cpus-per-task={job.cpus}",
        f"--mem-per-cpu={max(1, _megabytes(job.memory) // job.cpus)}M",
    ]
    if job.gpus:
        options.append(f"--gpus-per-task={job.gpus}")
    if job.time:
        options.append(f"--time={job.time}")
    options += [
        f"--signal=TERM@{job.notice}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    lines = "\n".join(f"#SBATCH {option}" for option in options)
    return f"""#!/bin/bash
{lines}

# {job.notice} s before the time limit, or at `scancel --signal=TERM JOB`, the tasks save and end with exit code {PREEMPTED}.
# Do not kill the remaining tasks when the first one ends: they may still be saving.
srun --cpus-per-task={job.cpus} --kill-on-bad-exit=0 --wait=0 --label {command(arguments)}
code=$?
if [ "$code" -eq {PREEMPTED} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _megabytes(memory: str) -> int:
    kilobytes = 1024 ** "KMGT".index(memory[-1])
    return max(1, int(memory[:-1]) * kilobytes // 1024)
