"""`ClusterConfig`: the tasks of a cluster, or the number of tasks to start here. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

from tfdist.config.constraints import MOST_SECONDS, MOST_TASKS, Constraint, between, option, parsed
from tfdist.errors import ConfigError, format_value


class WorkerRange(NamedTuple):
    """The smallest and the largest number of workers of a job; they are equal unless the job is elastic."""

    fewest: int
    most: int

    @property
    def is_elastic(self) -> bool:
        """Returns whether the number of workers may change."""
        return self.fewest < self.most


def worker_range(value: int | str, name: str = "cluster.workers") -> WorkerRange:
    """Returns the range of a number of workers, such as 4, or of a text `MIN:MAX`, such as `"1:4"`.

    `name` is the field or flag, for the error. Raises ConfigError if the value is neither.
    """
    match = re.fullmatch(r"(?:([0-9]{1,9}):)?([0-9]{1,9})", str(value))
    fewest = 0
    most = 0
    if match:
        most = int(match[2])
        fewest = int(match[1] or most)
    if not 1 <= fewest <= most <= MOST_TASKS:
        raise ConfigError(f"{name} must be 1 to {MOST_TASKS}, or MIN:MAX as 1:4. Received: {format_value(value)}.")
    return WorkerRange(fewest, most)


_ZERO_OR_ONE: Constraint = ("0 or 1", (0, 1).__contains__)


@dataclasses.dataclass
class ClusterConfig:
    """The cluster: that of the environment or of `hosts`, or else a cluster that is started on this machine.

    Attributes:
        workers: Number of training tasks to start on this machine, one process each, if the environment describes no cluster. A text
            `MIN:MAX`, such as `"1:4"`, makes the job elastic: it starts with the largest number and continues with fewer after a worker
            was killed (docs/elastic.md).
        join_seconds: Seconds after a loss during which an elastic job starts again with as many workers, while `max_restarts` lasts,
            before it continues with fewer.
        ps: Number of parameter servers. On this machine they are started besides the workers, with a chief; under a scheduler
            the last `ps` ranks are servers.
        evaluator: 1 starts another process on this machine, which evaluates each backup during the training; 0 does not.
        source: The resolver of the cluster: a name in `tfdist.cluster.resolvers.discovery.RESOLVERS` or of an installed resolver, `"auto"` for all in
            turn, or `"none"`.
        hosts: The training tasks' addresses instead, as `host1:2222,host2:2222`. `ps_hosts` has the parameter servers' addresses;
            `hostfile` names a file in place of `hosts`, with a line `host slots=2` for each host.
        task: This process's task, as `worker:1`; empty means the task of this host.
        warm: 1 starts tasks on this machine's CPUs by a fork of a process that has imported TensorFlow; 0 starts new processes.
        ray: The address of a Ray cluster on whose nodes the tasks start, or `"auto"` for that of the environment (docs/ray.md). Empty means
            this machine.
        cpus_per_worker: CPUs that each worker takes from the Ray cluster. `gpus_per_worker` are the GPUs.

    Examples:
        >>> from tfdist.config import ClusterConfig
        >>> ClusterConfig(workers=2).workers
        2
    """

    workers: int | str = parsed(1, lambda name, workers: worker_range(workers, name))
    ps: int = option(0, *between(0, MOST_TASKS))
    evaluator: int = option(0, *_ZERO_OR_ONE)
    source: str = "auto"
    hosts: str = ""
    ps_hosts: str = ""
    hostfile: str = ""
    task: str = ""
    warm: int = option(1, *_ZERO_OR_ONE)
    join_seconds: float = option(30.0, *between(0, MOST_SECONDS))
    ray: str = ""
    cpus_per_worker: float = option(1.0, *between(0, MOST_TASKS))
    gpus_per_worker: float = option(0.0, *between(0, MOST_TASKS))

    @property
    def starts_tasks(self) -> bool:
        """Returns whether tasks must be started, besides this process."""
        return worker_range(self.workers).most > 1 or self.ps > 0 or self.evaluator > 0 or bool(self.ray)

    def ray_resources(self) -> dict[str, float]:
        """Returns the resources of each worker on a Ray cluster, by Ray's names."""
        return {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}

    def resolver_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `discovery.resolve`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if name not in _OF_LAUNCHER}


_OF_LAUNCHER = ("workers", "evaluator", "join_seconds", "warm", "ray", "cpus_per_worker", "gpus_per_worker")
FLAGS = {
    "hosts": "The training tasks' addresses, as host1:2222,host2:2222.",
    "ps_hosts": "The parameter servers' addresses; the first of `hosts` is then the chief.",
    "hostfile": "A file in place of --hosts, with a line `host slots=2` for each host.",
    "task": "This process's task, as worker:1. Default: the task of this host.",
}
