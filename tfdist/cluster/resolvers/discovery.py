"""Discovery of the cluster that the environment describes, and of this process's task in it. No TensorFlow here.

A resolver reads the variables of one system that starts processes. Resolvers run in this order if their variable is set:

    (hosts)      explicit hosts, before all others: see `cluster/resolvers/hosts.py`
    tf_config    TF_CONFIG: `tfdist launch`, Kubeflow's TFJob, by hand
    open_mpi     OMPI_COMM_WORLD_SIZE; before Slurm, in whose jobs mpirun may run
    skypilot     SKYPILOT_NODE_IPS; before Slurm, which may have the nodes
    slurm        SLURM_STEP_ID, which srun sets for the tasks of a step
    sagemaker    SM_HOSTS
    kubernetes   TFDIST_PODS, which the manifests of `tfdist cluster emit` set

To add a resolver, write a function of the variables, and add a line to `RESOLVERS`. Resolvers of installed distributions
(`tfdist/config/registry.py`) run after these, sorted by name.
"""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tfdist.cluster.preflight import START_TIMEOUT
from tfdist.cluster.resolvers import environment, kubernetes, open_mpi, sagemaker, skypilot, slurm, tf_config
from tfdist.cluster.resolvers import hosts as hosts_lib
from tfdist.cluster.resolvers.environment import Environment, RankAddresses, ResolvedCluster
from tfdist.cluster.spec import ClusterSpec, ClusterTask, TaskSpec, split_address
from tfdist.config import registry
from tfdist.config.registry import Plugin
from tfdist.errors import ClusterError, ConfigError, collect_errors, describe_error, format_value, unknown_name_message
from tfdist.runtime.log import logger

_Resolver: TypeAlias = Callable[[Environment], RankAddresses | ClusterTask | None]

# The variable that signals a resolver's cluster, and the resolver, by name, in the order of lookup.
RESOLVERS: dict[str, tuple[str, _Resolver]] = {
    "tf_config": ("TF_CONFIG", tf_config.resolve),
    "open_mpi": ("OMPI_COMM_WORLD_SIZE", open_mpi.resolve),
    "skypilot": ("SKYPILOT_NODE_IPS", skypilot.resolve),
    "slurm": ("SLURM_STEP_ID", slurm.resolve),
    "sagemaker": ("SM_HOSTS", sagemaker.resolve),
    "kubernetes": ("TFDIST_PODS", kubernetes.resolve),
}
_RESERVED = ("auto", "none", *RESOLVERS)
GPUS_SHARED = "TFDIST_GPUS_SHARED"  # set if CUDA_VISIBLE_DEVICES is already this task's share


def resolve(
    environ: Mapping[str, str] | None = None,
    source: str = "auto",
    ps: int = 0,
    timeout: float = START_TIMEOUT,
    **host_arguments: str,
) -> ResolvedCluster | None:
    """Returns the cluster of the host arguments or of the environment, or None if neither describes a cluster.

    Args:
        environ: The environment; None means this process's.
        source: The resolver: a name in `RESOLVERS` or of an installed resolver; `"auto"` for all in order; `"none"` for no resolver.
        ps: Number of parameter servers, if the environment has ranks without roles: rank 0 is then the chief, the last
            `ps` ranks are servers, and the ranks between are workers. 0 makes all ranks workers.
        timeout: Seconds to wait for the other tasks, if the environment does not have their addresses.
        **host_arguments: The arguments of `hosts.cluster`, instead of the environment.

    Raises:
        ConfigError: The environment describes an invalid cluster (the error lists every problem), or no cluster of `source`.
        ClusterError: The other tasks have not sent their addresses in time.
    """
    environ = os.environ if environ is None else environ
    if any(host_arguments.values()):
        if source != "auto":
            raise ConfigError(f"cluster source {source} and a list of hosts are given; leave out one of them.")
        placed = hosts_lib.cluster(ps=ps, **host_arguments)
        share = assign_gpus(Environment(environ, timeout), *placed)
        return ResolvedCluster(*placed, "hosts", {name: text for name, text in host_arguments.items() if text}, share)
    for name, sign, resolver in _asked(source):
        variables = Environment(environ, timeout)
        if sign and not variables.get(sign):
            if source == "auto":
                continue
            raise ConfigError(f"the environment describes no cluster of {source}: {sign} is not set.")
        resolved = _ask(name, resolver, variables, ps)
        if resolved:
            return resolved
    return None


def find_cluster(ps: int = 0, timeout: float = START_TIMEOUT) -> ClusterTask | None:
    """Returns the cluster of this process's environment and the process's task, or None if it describes no cluster.

    Args:
        ps: As for `resolve`.
        timeout: As for `resolve`.

    Raises:
        ConfigError: As `resolve`.

    Examples:
        >>> import tfdist
        >>> tfdist.find_cluster() is None  # without TF_CONFIG, a scheduler or hosts
        True
    """
    resolved = resolve(ps=ps, timeout=timeout)
    return resolved.apply() if resolved else None


def _asked(source: str) -> Iterator[tuple[str, str, _Resolver]]:
    """Yields the name, variable and function of each resolver that `source` names.

    Installed resolvers come last, because the search for them takes time.
    """
    yield from ((name, *RESOLVERS[name]) for name in RESOLVERS if source in ("auto", name))
    if source in ("none", *RESOLVERS):
        return
    installed = registry.find_plugins("cluster source", _RESERVED)
    if source not in ("auto", *installed):
        raise ConfigError(unknown_name_message("cluster source", source, (*_RESERVED, *installed)))
    for name, plugin in installed.items():
        if source == name or (source == "auto" and plugin.variable):
            yield name, plugin.variable, functools.partial(_ask_plugin, name, plugin)


def _ask(name: str, resolver: _Resolver, variables: Environment, ps: int) -> ResolvedCluster | None:
    """Calls a resolver, and assigns roles to tasks without roles. Errors begin with the resolver's name."""
    faults: list[str] = []
    with collect_errors(faults):
        answer = resolver(variables)
        if answer is None:
            return None
        if isinstance(answer, RankAddresses):
            if len(answer.addresses) == 1:
                return None  # a single process, which may start others
            answer = environment.assign_roles(answer.addresses, answer.rank, ps)
        return ResolvedCluster(*answer, name, variables.read, assign_gpus(variables, *answer))
    if name != "tf_config":  # whose errors begin with TF_CONFIG
        faults = [f"{name}: {fault}" for fault in faults]
    raise ConfigError(faults)


def _ask_plugin(name: str, plugin: Plugin, variables: Environment) -> RankAddresses | ClusterTask | None:
    """Imports an installed resolver, and calls it."""
    resolver = registry.load("cluster source", name, plugin)
    try:
        answer = resolver(variables)
    except (ConfigError, ClusterError):
        raise
    except Exception as e:
        raise ConfigError(f"the resolver of distribution {plugin.distributions[0]} raises {describe_error(e)}.") from e
    if answer is None or isinstance(answer, RankAddresses):
        return answer
    match answer:
        case (ClusterSpec(), TaskSpec()):
            return ClusterTask(*answer)
    raise ConfigError(
        f"the resolver of distribution {plugin.distributions[0]} must return RankAddresses, a pair of ClusterSpec and TaskSpec, "
        f"or None. Received: {format_value(answer)}."
    )


def assign_gpus(variables: Environment, cluster: ClusterSpec, task: TaskSpec) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES with this task's share of its host's GPUs; empty if tasks do not share GPUs.

    Tasks that compute, the workers and a chief without parameter servers, get equal shares. The others get no GPUs, because TensorFlow would
    reserve all memory of them.

    Raises:
        ConfigError: The host has GPUs, and more tasks that compute.
    """
    # Slurm, Ray, or an earlier call of this function, has already given this task its GPUs.
    bound = variables.get("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", GPUS_SHARED)
    if bound or variables.get("SLURM_GPU_BIND") not in ("", "none") or "gpu" in variables.get("SLURM_TRES_PER_TASK"):
        return {}
    if task.type == "evaluator":  # it has no address, which would tell its host
        return {}
    host, _ = split_address(cluster.address(task))
    tasks_of_host = [other for other in cluster.tasks() if split_address(cluster.address(other))[0] == host]
    computing = [other for other in tasks_of_host if other.type == "worker" or not cluster.jobs.get("ps")]
    visible = _visible_gpus(variables)
    if len(tasks_of_host) < 2 or not visible:
        return {}
    gpus_per_task = len(visible) // max(len(computing), 1)
    if computing and not gpus_per_task:
        # TensorFlow would reserve all memory of a GPU for one of them, and NCCL takes a GPU once.
        raise ConfigError(
            f"{len(computing)} tasks that compute share the host {host}, and each needs a GPU. Received: {len(visible)} "
            f"({','.join(visible)}). Start at most {len(visible)} there, as by --workers={len(visible)}, or set CUDA_VISIBLE_DEVICES= "
            "(empty), by which all compute on the CPU."
        )
    if task not in computing:
        return {"CUDA_VISIBLE_DEVICES": "", GPUS_SHARED: "1"}
    if len(computing) == 1:
        return {}
    number = computing.index(task)
    unused = len(visible) - gpus_per_task * len(computing)
    if unused and number == 0:
        logger.warning(
            f"{len(computing)} tasks share the {len(visible)} GPUs of the host {host}: each uses {gpus_per_task}, and {unused} "
            f"{'is' if unused == 1 else 'are'} unused. To use all, start a number of tasks that divides it."
        )
    share = visible[number * gpus_per_task : (number + 1) * gpus_per_task]
    return {"CUDA_VISIBLE_DEVICES": ",".join(share), GPUS_SHARED: "1"}


def check_gpus(cluster: ClusterSpec, here: Sequence[TaskSpec] | None = None) -> None:
    """Checks that this host has a GPU for each task that computes, or none, before the tasks `here` start; None means all tasks.

    Raises:
        ConfigError: As `assign_gpus`.
    """
    assign_gpus(Environment(os.environ), cluster, (here or cluster.tasks())[-1])


def _visible_gpus(variables: Environment) -> list[str]:
    if not variables.has("CUDA_VISIBLE_DEVICES"):
        return list(map(str, range(_count_gpus())))
    named = map(str.strip, variables.get("CUDA_VISIBLE_DEVICES").split(","))
    return list(itertools.takewhile(lambda gpu: gpu not in ("", "-1"), named))  # as CUDA reads it


def _count_gpus() -> int:
    """Returns the number of NVIDIA GPUs of this host; by default every process sees all of them."""
    return sum(path.name[6:].isdecimal() for path in pathlib.Path("/dev").glob("nvidia*"))


def signals() -> list[str]:
    """Returns the variables that signal a cluster: each task of a cluster has at least one of them."""
    installed = registry.find_plugins("cluster source", _RESERVED)
    return [
        *(sign for sign, _ in RESOLVERS.values()),
        *(plugin.variable for plugin in installed.values() if plugin.variable),
    ]


def misconfiguration_hint(environ: Mapping[str, str] | None = None) -> str:
    """Returns a hint if the environment looks like a misconfigured Slurm job, or an empty text."""
    environ = os.environ if environ is None else environ
    tasks = environ.get("SLURM_NTASKS", "1")
    if tasks != "1" and environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return f"this Slurm job has {tasks} tasks, but without srun its script starts one: put srun before the command"
    return ""
