"""The environment to a cluster and this process's task in it, for each system that starts processes. No TensorFlow here.

Who is asked, in this order, and the variable that tells it is there:

    (hosts)      before all others, what was given: see `cluster/resolvers/hosts.py`
    tf_config    TF_CONFIG: `tfdist.launch`, Kubeflow's TFJob, by hand
    open_mpi     OMPI_COMM_WORLD_SIZE; before Slurm, in whose jobs mpirun may run
    slurm        SLURM_STEP_ID, which srun sets for the tasks of a step
    sagemaker    SM_HOSTS
    kubernetes   TFDIST_PODS, which the manifests of `python -m tfdist.cluster emit` set

A new one is a function of the variables, and a line in `RESOLVERS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from tfdist.cluster.preflight import START_TIMEOUT
from tfdist.cluster.resolvers import environment, kubernetes, open_mpi, sagemaker, slurm, tf_config
from tfdist.cluster.resolvers import hosts as hosts_lib
from tfdist.cluster.resolvers.environment import Environment, RankAddresses, ResolvedCluster
from tfdist.cluster.resolvers.gpus import assign_gpus
from tfdist.cluster.spec import ClusterTask
from tfdist.errors import ConfigError, collect_errors, unknown_name_message


def resolve(
    environ: Mapping[str, str] | None = None,
    source: str = "auto",
    ps: int = 0,
    timeout: float = START_TIMEOUT,
    **given: str,
) -> ResolvedCluster | None:
    """Returns the cluster that was given or that the environment describes, or None where there is none.

    Args:
        environ: The environment; None means this process's.
        source: Who is asked: one of `RESOLVERS`; `"auto"`, all of them in their order; `"none"`.
        ps: How many ranks are parameter servers, where the environment tells ranks and no roles: rank 0 is then the chief, the
            last `ps` ranks are servers, and those between are workers. 0 makes all of them workers.
        timeout: Seconds to wait for the others, where the environment does not tell their addresses.
        **given: What `hosts.cluster` takes, instead of the environment.

    Raises:
        ConfigError: With every fault of what the environment describes, or it tells nothing of `source`.
        ClusterError: The others have not told their addresses in time.
    """
    if source not in ("auto", "none", *RESOLVERS):
        raise ConfigError(unknown_name_message("cluster source", source, ("auto", "none", *RESOLVERS)))
    environ = os.environ if environ is None else environ
    if any(given.values()):
        if source != "auto":
            raise ConfigError(f"cluster source {source} and a list of hosts are given; leave out one of them.")
        placed = hosts_lib.cluster(ps=ps, **given)
        share = assign_gpus(Environment(environ, timeout), *placed)
        return ResolvedCluster(*placed, "hosts", {name: text for name, text in given.items() if text}, share)
    if source in RESOLVERS and not environ.get(sign := RESOLVERS[source][0]):
        raise ConfigError(f"the environment tells of no cluster of {source}: {sign} is not set.")
    for name in RESOLVERS if source == "auto" else () if source == "none" else (source,):
        if found := _ask(name, Environment(environ, timeout), ps):
            return found
    return None


def misconfiguration_hint(environ: Mapping[str, str] | None = None) -> str:
    """Returns what seems to be meant where there is no cluster, or an empty text."""
    environ = os.environ if environ is None else environ
    tasks = environ.get("SLURM_NTASKS", "1")
    if tasks != "1" and environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return (
            f"this Slurm job has {tasks} tasks, of which a script's own shell starts one: put srun before the command"
        )
    return ""


def find_cluster(ps: int = 0, timeout: float = START_TIMEOUT) -> ClusterTask | None:
    """Returns the cluster that this process's environment describes and its task, or None where it describes none.

    Args:
        ps: As for `resolve`.
        timeout: As for `resolve`.

    Raises:
        ConfigError: As `resolve`.
    """
    found = resolve(ps=ps, timeout=timeout)
    return found.apply() if found else None


def _ask(name: str, variables: Environment, ps: int) -> ResolvedCluster | None:
    sign, resolver = RESOLVERS[name]
    if not variables.get(sign):
        return None
    faults: list[str] = []
    with collect_errors(faults):
        found = resolver(variables)
        if found is None:
            return None
        if isinstance(found, RankAddresses):
            if len(found.addresses) == 1:
                return None  # one process alone, which may start others
            found = environment.assign_roles(found.addresses, found.rank, ps)
        return ResolvedCluster(*found, name, variables.read, assign_gpus(variables, *found))
    raise ConfigError(fault if name == "tf_config" else f"{name}: {fault}" for fault in faults)


# By name, the variable that tells of it, and the resolver, in the order in which they are asked.
RESOLVERS: dict[str, tuple[str, Callable[[Environment], RankAddresses | ClusterTask | None]]] = {
    "tf_config": ("TF_CONFIG", tf_config.resolve),
    "open_mpi": ("OMPI_COMM_WORLD_SIZE", open_mpi.resolve),
    "slurm": ("SLURM_STEP_ID", slurm.resolve),
    "sagemaker": ("SM_HOSTS", sagemaker.resolve),
    "kubernetes": ("TFDIST_PODS", kubernetes.resolve),
}
