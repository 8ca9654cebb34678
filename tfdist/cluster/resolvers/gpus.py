"""Each task's share of the GPUs of its host. No TensorFlow here."""

from __future__ import annotations

import pathlib

from tfdist.cluster.resolvers.environment import Environment
from tfdist.cluster.spec import ClusterSpec, TaskSpec

SHARED = "TFDIST_GPUS_SHARED"  # set where CUDA_VISIBLE_DEVICES is a share already


def _gpus() -> int:
    """Returns the number of NVIDIA GPUs of this host, of which every process sees all, unless it is told otherwise."""
    return sum(path.name[6:].isdecimal() for path in pathlib.Path("/dev").glob("nvidia*"))


def assign_gpus(variables: Environment, cluster: ClusterSpec, task: TaskSpec) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES where tasks of one host see the same GPUs, each worker its part; else nothing.

    A chief of parameter servers, and a server, get none: TensorFlow would take all of their memory.

    Args:
        variables: The environment.
        cluster: The addresses of all tasks.
        task: This process's.
    """
    bound = variables.get("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", SHARED)
    if bound or variables.get("SLURM_GPU_BIND") not in ("", "none") or "gpu" in variables.get("SLURM_TRES_PER_TASK"):
        return {}
    if task.type == "evaluator":
        return {}
    host = cluster.address(task).rpartition(":")[0]
    here = [other for other in cluster.tasks() if cluster.address(other).rpartition(":")[0] == host]
    workers = [other for other in here if other.type == "worker"]
    if len(here) < 2:
        return {}
    named = variables.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(_gpus())))
    visible = [each.strip() for each in named.split(",") if each.strip()]
    if task not in workers:
        return {"CUDA_VISIBLE_DEVICES": "", SHARED: "1"} if visible else {}
    each = len(visible) // len(workers)
    if len(workers) == 1 or not each:
        return {}
    first = workers.index(task) * each
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + each]), SHARED: "1"}
