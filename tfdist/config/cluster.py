"""`ClusterConfig`: the tasks of a cluster, or the number of tasks to start here. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class ClusterConfig:
    """The cluster: that of the environment or of `hosts`, or else a cluster that is started on this machine.

    Attributes:
        workers: Number of training tasks to start on this machine, one process each, if the environment describes no cluster.
        ps: Number of parameter servers. On this machine they are started besides the workers, with a chief; under a scheduler
            the last `ps` ranks are servers.
        evaluator: 1 starts another process on this machine, which evaluates each backup during the training; 0 does not.
        source: The resolver of the cluster: a name in `tfdist.cluster.resolvers.discovery.RESOLVERS` or of an installed resolver, `"auto"` for all in
            turn, or `"none"`.
        hosts: The training tasks' addresses instead, as `host1:2222,host2:2222`. `ps_hosts` has the parameter servers' addresses;
            `hostfile` names a file in place of `hosts`, with a line `host slots=2` for each host.
        task: This process's task, as `worker:1`; empty means the task of this host.
        warm: 1 starts and restarts tasks on this machine's processors by a fork of a process that has imported TensorFlow; 0 does not.

    Examples:
        >>> from tfdist.config import ClusterConfig
        >>> ClusterConfig(workers=2).workers
        2
    """

    workers: int = 1
    ps: int = 0
    evaluator: int = 0
    source: str = "auto"
    hosts: str = ""
    ps_hosts: str = ""
    hostfile: str = ""
    task: str = ""
    warm: int = 1

    def resolver_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `discovery.resolve`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if name not in ("workers", "evaluator", "warm")}


FLAGS = {
    "hosts": "The training tasks' addresses, as host1:2222,host2:2222.",
    "ps_hosts": "The parameter servers' addresses; the first of `hosts` is then the chief.",
    "hostfile": "A file in place of --hosts, with a line `host slots=2` for each host.",
    "task": "This process's task, as worker:1. Default: the task of this host.",
}
