"""Slurm: the tasks that srun starts. No TensorFlow here."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tfdist.cluster.resolvers.environment import Environment, RankAddresses, select_port
from tfdist.errors import ConfigError, format_value

_HET_SIZE = ("SLURM_HET_SIZE", "SLURM_PACK_SIZE")
_MOST_NAMES = 100_000  # in a node list; a longer range is a mistake
_NAME_PART = re.compile(r"(?P<text>[^\[\],]*)(?:\[(?P<ranges>[^\[\]]*)\])?")
_NODE_RANGE = re.compile(r"(?P<first>[0-9]{1,18})(?:-(?P<last>[0-9]{1,18}))?")
_TASK_COUNT = re.compile(r"(?P<count>[0-9]{1,9})(?:\(x(?P<times>[0-9]{1,9})\))?")


def resolve(variables: Environment) -> RankAddresses | None:
    """Returns the addresses of the tasks of a Slurm job step, and this process's rank.

    Each task of a node has its own port.

    Raises:
        ConfigError: A variable is missing or invalid, or the variables contradict each other.
    """
    rank = variables.require_index("SLURM_PROCID")
    step = variables.require("SLURM_STEP_ID")
    nodes = expand_hosts(variables.require("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    counts = tasks_per_node(variables.require("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    size = variables.size("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if len(counts) != len(nodes) or sum(counts) != size:
        raise ConfigError(
            f"the nodes, the tasks on each and the number of tasks do not agree. Received: {len(nodes)} nodes, {sum(counts)} "
            f"tasks on {len(counts)} nodes, {size} tasks."
        )
    distribution = variables.get("SLURM_DISTRIBUTION")
    if variables.get(*_HET_SIZE):
        # Slurm places the components of a heterogeneous job one after the other and ignores SLURM_DISTRIBUTION. It numbers nodes by
        # component, not by their order in the list.
        distribution = ""
        tasks_of = dict(zip(nodes, counts, strict=True))
        nodes = [node for node in _heterogeneous_nodes(variables) if node in tasks_of]
        counts = [tasks_of[node] for node in nodes]
        if len(nodes) != len(tasks_of):
            raise ConfigError(
                f"components that share a node are not supported; give each its own nodes. Received: {', '.join(nodes)}."
            )
    places = task_placement(counts, distribution, variables.get("SLURM_DIST_PLANESIZE"))
    node = variables.require_index("SLURM_NODEID")
    local = variables.require_index("SLURM_LOCALID")
    name = variables.get("SLURMD_NODENAME")
    if places[rank : rank + 1] != [(node, local)] or (name and name != nodes[node]):
        raise ConfigError(
            f"task {rank} is task {local} of node {node}{name and f' ({name})'}, not where SLURM_DISTRIBUTION places it "
            f"among {size} tasks; use srun --distribution=block. Received: {distribution or 'none'}."
        )
    reserved = variables.get("SLURM_STEP_RESV_PORTS")
    if reserved:
        ports = [int(port) for port in expand_hosts(f"[{reserved}]")]
    else:
        first = select_port(variables, f"{variables.require('SLURM_JOB_ID', 'SLURM_JOBID')}.{step}")
        ports = [first + number for number in range(max(counts))]
    if len(ports) < max(counts):
        raise ConfigError(
            f"a node with {max(counts)} tasks needs {max(counts)} ports; use srun --resv-ports={max(counts)}. "
            f"Received: SLURM_STEP_RESV_PORTS={reserved}."
        )
    names = nodes if len(nodes) > 1 else ["127.0.0.1"]
    return RankAddresses([f"{names[node]}:{ports[number]}" for node, number in places], rank)


def _heterogeneous_nodes(variables: Environment) -> Iterator[str]:
    for group in range(variables.require_index(*_HET_SIZE)):
        yield from expand_hosts(
            variables.require(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", f"SLURM_JOB_NODELIST_PACK_GROUP_{group}")
        )


def task_placement(counts: list[int], distribution: str = "", plane_size: str = "") -> list[tuple[int, int]]:
    """Returns, for each task, its node and its index on that node; `counts` has the number of tasks on each node.

    Slurm's `block` fills one node after the other, `cyclic` places one task on each node in turn, and `plane` places `plane_size` tasks. Text
    after a colon, as in `block:cyclic`, concerns cores.
    """
    kind, _, size = re.split("[:,]", distribution.lower())[0].partition("=")
    at_once = max(counts, default=1)  # block
    if kind == "cyclic":
        at_once = 1
    elif kind == "plane":
        size = size or plane_size
        at_once = max(1, int(size)) if size.isdigit() else 1
    placement: list[tuple[int, int]] = []
    done = [0] * len(counts)
    while len(placement) < sum(counts):
        for node, count in enumerate(counts):
            for _ in range(min(at_once, count - done[node])):
                placement.append((node, done[node]))
                done[node] += 1
    return placement


def tasks_per_node(text: str) -> list[int]:
    """Returns the numbers in a list such as `2(x3),1`: 2, 2, 2, 1.

    Raises:
        ConfigError: The text is not such a list.
    """
    sizes: list[int] = []
    for part in text.split(","):
        match = _TASK_COUNT.fullmatch(part.strip())
        if match is None or len(sizes) + int(match["times"] or 1) > _MOST_NAMES:
            raise ConfigError(f"tasks per node must be a list such as '2(x3),1'. Received: {format_value(text)}.")
        sizes += [int(match["count"])] * int(match["times"] or 1)
    return sizes


def expand_hosts(text: str) -> list[str]:
    """Returns the names in a node list, as `scontrol show hostnames` does.

    Args:
        text: A list such as `n[009-011,20],login1`. A name may have several brackets, as `rack[1-2]n[1-4]`; the last
            bracket varies fastest. Numbers keep their leading zeros.

    Raises:
        ConfigError: The text is not a node list.
    """
    names: list[str] = []
    for name in _split_names(text):
        names += _expand_name(name, text)
    if not names:
        raise ConfigError("a node list must have at least one name, such as 'n[1-3]'. Received: ''.")
    return names


def _split_names(text: str) -> Iterator[str]:
    """Yields the parts between commas that are not in brackets."""
    depth = begin = 0
    for position, sign in enumerate(text):
        depth += {"[": 1, "]": -1}.get(sign, 0)
        if sign == "," and depth == 0:
            yield text[begin:position]
            begin = position + 1
    yield text[begin:]


def _expand_name(name: str, node_list: str) -> list[str]:
    expanded = [""]
    position = 0
    name = name.strip()
    while position < len(name):
        match = _NAME_PART.match(name, position)
        if match is None or match.end() == position:
            raise _node_list_error(node_list)
        ends = [match["text"]]
        if match["ranges"] is not None:
            ends = [
                match["text"] + number
                for part in match["ranges"].split(",")
                for number in _expand_range(part, node_list)
            ]
        if len(expanded) * len(ends) > _MOST_NAMES:
            raise _node_list_error(node_list)
        expanded = [begin + end for begin in expanded for end in ends]
        position = match.end()
    if expanded == [""]:
        raise _node_list_error(node_list)
    return expanded


def _expand_range(text: str, node_list: str) -> list[str]:
    match = _NODE_RANGE.fullmatch(text.strip())
    if match is None:
        raise _node_list_error(node_list)
    first = match["first"]
    last = match["last"] or first
    if not 0 <= int(last) - int(first) < _MOST_NAMES:
        raise _node_list_error(node_list)
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _node_list_error(text: str) -> ConfigError:
    return ConfigError(f"a node list must be such as 'n[009-011,20],login1'. Received: {format_value(text)}.")
