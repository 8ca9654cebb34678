"""Slurm: the tasks that srun starts. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.cluster.resolvers import slurm_node_lists
from tfdist.cluster.resolvers.environment import Environment, RankAddresses, select_port
from tfdist.errors import ConfigError


def resolve(variables: Environment) -> RankAddresses | None:
    """Returns the addresses of the tasks of a Slurm job step, and this process's rank.

    Args:
        variables: The environment: the step's nodes, the tasks on each node, and how tasks are distributed over nodes.

    Returns:
        The addresses by rank; each task of a node has its own port.

    Raises:
        ConfigError: A variable is missing or faulty, or the variables contradict each other.
    """
    rank, step = variables.require_index("SLURM_PROCID"), variables.require("SLURM_STEP_ID")
    nodes = slurm_node_lists.hosts(variables.require("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    counts = slurm_node_lists.tasks_per_node(variables.require("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    size = variables.size("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if len(counts) != len(nodes) or sum(counts) != size:
        raise ConfigError(
            f"the nodes, the tasks on each and the number of tasks do not agree. Received: {len(nodes)} nodes, {sum(counts)} "
            f"tasks on {len(counts)} nodes, {size} tasks."
        )
    if variables.get(*_HET_SIZE):  # nodes are numbered by components, and not as they are listed
        tasks_of = dict(zip(nodes, counts, strict=True))
        nodes = [node for node in _heterogeneous_nodes(variables) if node in tasks_of]
        counts = [tasks_of[node] for node in nodes]
        if len(nodes) != len(tasks_of):
            raise ConfigError(f"components that share a node are not known. Received: {', '.join(nodes)}.")
    # Components of a heterogeneous job come one after the other, whatever it says.
    distribution = "" if variables.get(*_HET_SIZE) else variables.get("SLURM_DISTRIBUTION")
    places = slurm_node_lists.task_placement(counts, distribution, variables.get("SLURM_DIST_PLANESIZE"))
    node, local = variables.require_index("SLURM_NODEID"), variables.require_index("SLURM_LOCALID")
    name = variables.get("SLURMD_NODENAME")
    if places[rank : rank + 1] != [(node, local)] or (name and name != nodes[node]):
        raise ConfigError(
            f"task {rank} is task {local} of node {node}{name and f' ({name})'}, which no known distribution makes of {size} "
            f"tasks; use srun --distribution=block. Received: {distribution or 'none'}."
        )
    if reserved := variables.get("SLURM_STEP_RESV_PORTS"):
        ports = [int(port) for port in slurm_node_lists.hosts(f"[{reserved}]")]
    else:
        first = select_port(variables, f"{variables.require('SLURM_JOB_ID', 'SLURM_JOBID')}.{step}")
        ports = [first + each for each in range(max(counts))]
    if len(ports) < max(counts):
        raise ConfigError(
            f"a node with {max(counts)} tasks needs as many ports; srun --resv-ports={max(counts)}. "
            f"Received: SLURM_STEP_RESV_PORTS={reserved}."
        )
    names = nodes if len(nodes) > 1 else ["127.0.0.1"]
    return RankAddresses([f"{names[node]}:{ports[each]}" for node, each in places], rank)


_HET_SIZE = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")


def _heterogeneous_nodes(variables: Environment) -> Iterator[str]:
    for group in range(variables.require_index(*_HET_SIZE)):
        yield from slurm_node_lists.hosts(
            variables.require(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", f"SLURM_JOB_NODELIST_PACK_GROUP_{group}")
        )
