"""The input and the output of a resolver: `Environment`, and `RankAddresses` or `ResolvedCluster`. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfdist.cluster.preflight import START_TIMEOUT
from tfdist.cluster.spec import ClusterSpec, ClusterTask, TaskSpec
from tfdist.cluster.validation import MOST_TASKS, is_index
from tfdist.errors import ConfigError, format_value

PORT = 2222  # the default


class Environment:
    """An environment that records which variables were read.

    Attributes:
        read: The variables that were read and set.
        timeout: Seconds to wait for addresses that the environment does not have.
    """

    def __init__(self, environ: Mapping[str, str], timeout: float = START_TIMEOUT):
        self._environ = environ
        self.timeout = timeout
        self.read: dict[str, str] = {}

    def has(self, name: str) -> bool:
        """Returns whether a variable is set, perhaps to an empty text."""
        return name in self._environ

    def get(self, *names: str) -> str:
        """Returns the first of the variables that is set and not empty, or an empty text."""
        for name in names:
            value = self._environ.get(name, "").strip()
            if value:
                self.read[name] = value
                return value
        return ""

    def require(self, *names: str) -> str:
        """Returns the same as `get`; raises ConfigError if no variable is set."""
        value = self.get(*names)
        if not value:
            raise ConfigError(f"{' or '.join(names)} must be set, because {next(iter(self.read))} is set.")
        return value

    def require_index(self, *names: str) -> int:
        """Returns the value of `require` as a whole number from 0; raises ConfigError for other values."""
        value = self.require(*names)
        if not is_index(value):
            name = next(name for name in names if self.read.get(name) == value)
            raise ConfigError(f"{name} must be a whole number from 0. Received: {format_value(value)}.")
        return int(value)

    def size(self, *names: str) -> int:
        """Returns the value of `require_index` as a number of tasks; raises ConfigError if it is larger than `MOST_TASKS`."""
        size = self.require_index(*names)
        if size > MOST_TASKS:
            raise ConfigError(f"{names[0]} must be a number of tasks, at most {MOST_TASKS}. Received: {size}.")
        return size


class RankAddresses(NamedTuple):
    """Tasks without roles: the address of each rank, and this process's rank."""

    addresses: Sequence[str]
    rank: int


@dataclasses.dataclass(frozen=True)
class ResolvedCluster:
    """A cluster, this process's task in it, and the resolver and variables that describe it.

    Attributes:
        cluster: The addresses of all tasks.
        task: This process's task.
        source: The resolver's name.
        variables: The variables that the resolver read, by name.
        environ: Variables that this process's environment lacks: its share of the GPUs.
    """

    cluster: ClusterSpec
    task: TaskSpec
    source: str
    variables: Mapping[str, str]
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def apply(self) -> ClusterTask:
        """Sets the missing environment variables, and returns the cluster and the task."""
        os.environ.update(self.environ)
        return ClusterTask(self.cluster, self.task)


def assign_roles(addresses: Sequence[str], rank: int, ps: int = 0) -> ClusterTask:
    """Returns the cluster that the ranks form, and the task of one rank.

    With `ps` parameter servers rank 0 is the chief, the last `ps` ranks are servers, and the ranks between are workers. Without servers
    all ranks are workers.

    Raises:
        ConfigError: The rank is out of range, or there are fewer than `ps + 2` ranks.
    """
    size = len(addresses)
    if rank >= size:
        raise ConfigError(f"rank {rank} is out of range; there are {size} ranks, 0 to {size - 1}.")
    if not ps:
        return ClusterTask(ClusterSpec({"worker": addresses}), TaskSpec("worker", rank))
    if size < ps + 2:
        raise ConfigError(
            f"{ps} parameter servers need a chief and a worker besides: start {ps + 2} tasks or more. Received: {size}."
        )
    spec = ClusterSpec({"chief": addresses[:1], "worker": addresses[1 : size - ps], "ps": addresses[size - ps :]})
    return ClusterTask(spec, spec.tasks()[rank])


def select_port(variables: Environment, job: str = "") -> int:
    """Returns TFDIST_PORT if it is set, else a port hashed from `job`, since jobs may share a host; the default port if `job` is empty."""
    if variables.get("TFDIST_PORT"):
        return variables.require_index("TFDIST_PORT")
    return 10000 + zlib.crc32(job.encode()) % 20000 if job else PORT
