"""The environment to a cluster and this process's task in it, for each system that starts processes. No TensorFlow here.

Who is asked, in this order, and the variable that tells it is there:

    (hosts)      before all others, what was given: see `host_list.py`
    tf_config    TF_CONFIG: `tfdist.launch`, Kubeflow's TFJob, by hand
    open_mpi     OMPI_COMM_WORLD_SIZE; before Slurm, in whose jobs mpirun may run
    slurm        SLURM_STEP_ID, which srun sets for the tasks of a step
    sagemaker    SM_HOSTS
    kubernetes   TFDIST_PODS, which the manifests of `python -m tfdist.cluster emit` set

A new one is a function of the variables, and a line in `RESOLVERS`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfdist import host_list, node_lists, rendezvous
from tfdist.cluster import ClusterSpec, TaskSpec, from_tf_config
from tfdist.cluster_faults import MOST_TASKS
from tfdist.errors import ConfigError, collected, shown, unknown
from tfdist.preflight import START_TIMEOUT


@dataclasses.dataclass(frozen=True)
class Found:
    """A cluster, this process's task in it, and where it says so.

    Attributes:
        cluster: The addresses of all tasks.
        task: This process's task.
        source: The resolver's name.
        variables: What it read, by name.
        environ: What this process's environment lacks: its share of the GPUs.
    """

    cluster: ClusterSpec
    task: TaskSpec
    source: str
    variables: Mapping[str, str]
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def enter(self) -> tuple[ClusterSpec, TaskSpec]:
        """Returns cluster and task, once this process's environment has what it lacked."""
        os.environ.update(self.environ)
        return self.cluster, self.task


_SHARED = "TFDIST_GPUS_SHARED"  # set where CUDA_VISIBLE_DEVICES is a share already


class Variables:
    """An environment that remembers what of it was read.

    Attributes:
        read: The variables that were read and set.
        timeout: Seconds to wait for what the environment does not tell.
    """

    def __init__(self, environ: Mapping[str, str], timeout: float = START_TIMEOUT):
        self._environ = environ
        self.timeout = timeout
        self.read: dict[str, str] = {}

    def get(self, *names: str) -> str:
        """Returns the first of the variables that is set and not empty, or an empty text."""
        for name in names:
            if value := self._environ.get(name, "").strip():
                self.read[name] = value
                return value
        return ""

    def need(self, *names: str) -> str:
        """As `get`, where one of them must be set."""
        if value := self.get(*names):
            return value
        raise ConfigError(f"{' or '.join(names)} must be set where {next(iter(self.read))} is.")

    def number(self, *names: str) -> int:
        """As `need`, a whole number from 0."""
        value = self.need(*names)
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            name = next(name for name in names if self.read.get(name) == value)
            raise ConfigError(f"{name} must be a whole number from 0. Received: {shown(value)}.")
        return int(value)

    def size(self, *names: str) -> int:
        """As `number`, of tasks."""
        if (size := self.number(*names)) > MOST_TASKS:
            raise ConfigError(f"{names[0]} must be a number of tasks, at most {MOST_TASKS}. Received: {size}.")
        return size


class _Ranks(NamedTuple):
    """Tasks without roles: the address of each rank, and this process's."""

    addresses: Sequence[str]
    rank: int


def find(
    environ: Mapping[str, str] | None = None,
    source: str = "auto",
    ps: int = 0,
    timeout: float = START_TIMEOUT,
    **given: str,
) -> Found | None:
    """Returns the cluster that was given or that the environment describes, or None where there is none.

    Args:
        environ: The environment; None means this process's.
        source: Who is asked: one of `RESOLVERS`; `"auto"`, all of them in their order; `"none"`.
        ps: How many ranks are parameter servers, where the environment tells ranks and no roles: rank 0 is then the chief, the
            last `ps` ranks are servers, and those between are workers. 0 makes all of them workers.
        timeout: Seconds to wait for the others, where the environment does not tell their addresses.
        **given: What `host_list.cluster` takes, instead of the environment.

    Raises:
        ConfigError: With every fault of what the environment describes, or it tells nothing of `source`.
        ClusterError: The others have not told their addresses in time.
    """
    if source not in ("auto", "none", *RESOLVERS):
        raise ConfigError(unknown("cluster source", source, ("auto", "none", *RESOLVERS)))
    environ = os.environ if environ is None else environ
    if any(given.values()):
        if source != "auto":
            raise ConfigError(f"cluster source {source} and a list of hosts are given; leave out one of them.")
        placed = host_list.cluster(ps=ps, **given)
        share = share_of_gpus(Variables(environ, timeout), *placed)
        return Found(*placed, "hosts", {name: text for name, text in given.items() if text}, share)
    if source in RESOLVERS and not environ.get(sign := RESOLVERS[source][0]):
        raise ConfigError(f"the environment tells of no cluster of {source}: {sign} is not set.")
    for name in RESOLVERS if source == "auto" else () if source == "none" else (source,):
        if found := _ask(name, Variables(environ, timeout), ps):
            return found
    return None


def overlooked(environ: Mapping[str, str] | None = None) -> str:
    """Returns what seems to be meant where there is no cluster, or an empty text."""
    environ = os.environ if environ is None else environ
    tasks = environ.get("SLURM_NTASKS", "1")
    if tasks != "1" and environ.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return (
            f"this Slurm job has {tasks} tasks, of which a script's own shell starts one: put srun before the command"
        )
    return ""


def find_cluster(ps: int = 0, timeout: float = START_TIMEOUT) -> tuple[ClusterSpec, TaskSpec] | None:
    """Returns the cluster that this process's environment describes and its task, or None where it describes none.

    Args:
        ps: As for `find`.
        timeout: As for `find`.

    Raises:
        ConfigError: As `find`.
    """
    found = find(ps=ps, timeout=timeout)
    return found.enter() if found else None


def _ask(name: str, variables: Variables, ps: int) -> Found | None:
    sign, resolver = RESOLVERS[name]
    if not variables.get(sign):
        return None
    faults: list[str] = []
    with collected(faults):
        found = resolver(variables)
        if found is None:
            return None
        if isinstance(found, _Ranks):
            if len(found.addresses) == 1:
                return None  # one process alone, which may start others
            cluster, task = host_list.with_roles(found.addresses, found.rank, ps)
            shared = share_of_gpus(variables, cluster, task)
            return Found(cluster, task, name, variables.read, shared)
        return Found(*found, name, variables.read, share_of_gpus(variables, *found))
    raise ConfigError(fault if name == "tf_config" else f"{name}: {fault}" for fault in faults)


def _tf_config(variables: Variables) -> tuple[ClusterSpec, TaskSpec] | None:
    text = variables.get("TF_CONFIG")
    return from_tf_config(text) if "".join(text.split()) != "{}" else None


def _open_mpi(variables: Variables) -> _Ranks | None:
    rank, size = variables.number("OMPI_COMM_WORLD_RANK"), variables.size("OMPI_COMM_WORLD_SIZE")
    local, here = variables.number("OMPI_COMM_WORLD_LOCAL_RANK"), variables.number("OMPI_COMM_WORLD_LOCAL_SIZE")
    job = variables.need("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    port = _port(variables, job)
    if here == size:
        return _Ranks([f"127.0.0.1:{port + each}" for each in range(size)], rank)
    # mpirun tells nobody where the others are.
    if not (folder := variables.get("TFDIST_RENDEZVOUS")):
        raise ConfigError(
            "TFDIST_RENDEZVOUS must name a folder that all hosts share, as mpirun tells none of the others."
        )
    # A job id may come again, this random key does not.
    start = variables.get("OMPI_MCA_orte_precondition_transports") or job
    address = f"{variables.get('TFDIST_HOST') or socket.gethostname()}:{port + local}"
    return _Ranks(rendezvous.exchange(folder, start, rank, size, address, variables.timeout), rank)


def _slurm(variables: Variables) -> _Ranks | None:
    rank, step = variables.number("SLURM_PROCID"), variables.need("SLURM_STEP_ID")
    nodes = node_lists.hosts(variables.need("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    counts = node_lists.tasks_per_node(variables.need("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    size = variables.size("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if len(counts) != len(nodes) or sum(counts) != size:
        raise ConfigError(
            f"the nodes, the tasks on each and the number of tasks do not agree. Received: {len(nodes)} nodes, {sum(counts)} "
            f"tasks on {len(counts)} nodes, {size} tasks."
        )
    if variables.get(*_HET_SIZE):  # nodes are numbered by components, and not as they are listed
        tasks_of = dict(zip(nodes, counts, strict=True))
        nodes = [node for node in _nodes_of_components(variables) if node in tasks_of]
        counts = [tasks_of[node] for node in nodes]
        if len(nodes) != len(tasks_of):
            raise ConfigError(f"components that share a node are not known. Received: {', '.join(nodes)}.")
    # Components of a heterogeneous job come one after the other, whatever it says.
    distribution = "" if variables.get(*_HET_SIZE) else variables.get("SLURM_DISTRIBUTION")
    places = node_lists.places(counts, distribution, variables.get("SLURM_DIST_PLANESIZE"))
    node, local = variables.number("SLURM_NODEID"), variables.number("SLURM_LOCALID")
    name = variables.get("SLURMD_NODENAME")
    if places[rank : rank + 1] != [(node, local)] or (name and name != nodes[node]):
        raise ConfigError(
            f"task {rank} is task {local} of node {node}{name and f' ({name})'}, which no known distribution makes of {size} "
            f"tasks; use srun --distribution=block. Received: {distribution or 'none'}."
        )
    if reserved := variables.get("SLURM_STEP_RESV_PORTS"):
        ports = [int(port) for port in node_lists.hosts(f"[{reserved}]")]
    else:
        first = _port(variables, f"{variables.need('SLURM_JOB_ID', 'SLURM_JOBID')}.{step}")
        ports = [first + each for each in range(max(counts))]
    if len(ports) < max(counts):
        raise ConfigError(
            f"a node with {max(counts)} tasks needs as many ports; srun --resv-ports={max(counts)}. "
            f"Received: SLURM_STEP_RESV_PORTS={reserved}."
        )
    names = nodes if len(nodes) > 1 else ["127.0.0.1"]
    return _Ranks([f"{names[node]}:{ports[each]}" for node, each in places], rank)


_HET_SIZE = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")


def _nodes_of_components(variables: Variables) -> Iterator[str]:
    for group in range(variables.number(*_HET_SIZE)):
        yield from node_lists.hosts(
            variables.need(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", f"SLURM_JOB_NODELIST_PACK_GROUP_{group}")
        )


def _sagemaker(variables: Variables) -> _Ranks | None:
    text = variables.get("SM_HOSTS")
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise ConfigError(f'SM_HOSTS must be a list such as ["algo-1", "algo-2"]. Received: {shown(text)}.')
    if (current := variables.need("SM_CURRENT_HOST")) not in hosts:
        raise ConfigError(f"SM_CURRENT_HOST must be one of SM_HOSTS, {', '.join(hosts)}. Received: {shown(current)}.")
    return _Ranks([f"{host}:{_port(variables)}" for host in hosts], hosts.index(current))


def _kubernetes(variables: Variables) -> _Ranks | None:
    """Pods of an Indexed Job or a StatefulSet are called NAME-INDEX, under a headless service."""
    size, service = variables.size("TFDIST_PODS"), variables.need("TFDIST_SERVICE")
    name, dash, index = variables.need("TFDIST_POD", "HOSTNAME").partition(".")[0].rpartition("-")
    index = variables.get("JOB_COMPLETION_INDEX") or index
    if not dash or not re.fullmatch("[0-9]{1,9}", index) or int(index) >= size:
        raise ConfigError(
            f"HOSTNAME must be NAME-INDEX, as of an Indexed Job's or a StatefulSet's pod, with an index of 0 to {size - 1}. "
            f"Received: {shown(variables.get('TFDIST_POD', 'HOSTNAME'))}."
        )
    return _Ranks([f"{name}-{each}.{service}:{_port(variables)}" for each in range(size)], int(index))


# By name, the variable that tells of it, and the resolver, in the order in which they are asked.
RESOLVERS: dict[str, tuple[str, Callable[[Variables], _Ranks | tuple[ClusterSpec, TaskSpec] | None]]] = {
    "tf_config": ("TF_CONFIG", _tf_config),
    "open_mpi": ("OMPI_COMM_WORLD_SIZE", _open_mpi),
    "slurm": ("SLURM_STEP_ID", _slurm),
    "sagemaker": ("SM_HOSTS", _sagemaker),
    "kubernetes": ("TFDIST_PODS", _kubernetes),
}


def _port(variables: Variables, job: str = "") -> int:
    """Returns TFDIST_PORT; or where several jobs may share a host, one that is this job's own, most likely."""
    if variables.get("TFDIST_PORT"):
        return variables.number("TFDIST_PORT")
    return 10000 + zlib.crc32(job.encode()) % 20000 if job else host_list.PORT


def _gpus() -> int:
    """Returns the number of NVIDIA GPUs of this host, of which every process sees all, unless it is told otherwise."""
    return sum(path.name[6:].isdecimal() for path in pathlib.Path("/dev").glob("nvidia*"))


def share_of_gpus(variables: Variables, cluster: ClusterSpec, task: TaskSpec) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES where tasks of one host see the same GPUs, each worker its part; else nothing.

    A chief of parameter servers, and a server, get none: TensorFlow would take all of their memory.

    Args:
        variables: The environment.
        cluster: The addresses of all tasks.
        task: This process's.
    """
    bound = variables.get("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", _SHARED)
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
        return {"CUDA_VISIBLE_DEVICES": "", _SHARED: "1"} if visible else {}
    each = len(visible) // len(workers)
    if len(workers) == 1 or not each:
        return {}
    first = workers.index(task) * each
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + each]), _SHARED: "1"}
