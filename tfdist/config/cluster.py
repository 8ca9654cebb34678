"""`ClusterConfig`: which tasks take part, or how many to start here. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class ClusterConfig:
    """The cluster: what the environment or `hosts` describe, or else one that is started on this machine.

    Attributes:
        workers: Training tasks to start on this machine, one process each, where there is no cluster.
        ps: Parameter servers: so many more processes, and a chief on top; or so many of the ranks that a scheduler has started.
        evaluator: 1 starts one process more on this machine, which evaluates each backup beside the training; 0 does not.
        source: Who is asked for the cluster: one of `tfdist.cluster.resolvers.discovery.RESOLVERS`, an installed one, `"auto"` for all in turn, or `"none"`.
        hosts: Or the training tasks' addresses, as `host1:2222,host2:2222`; likewise `ps_hosts`, the parameter servers', or
            `hostfile`, a file with a line `host slots=2` for each host.
        task: Which of them this process is, as `worker:1`; empty means the one that is on this host.

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

    def resolver_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `discovery.resolve`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if name not in ("workers", "evaluator")}


FLAGS = {
    "hosts": "The training tasks' addresses, as host1:2222,host2:2222.",
    "ps_hosts": "The parameter servers' addresses; the first of `hosts` is then the chief.",
    "hostfile": "A file in place of --hosts, with a line `host slots=2` for each host.",
    "task": "Which of the tasks this process is, as worker:1. Default: the one of this host.",
}
