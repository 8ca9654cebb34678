"""A cluster on this machine, on free ports. No TensorFlow here."""

from __future__ import annotations

import random
import socket

from tfdist.cluster.spec import ClusterSpec
from tfdist.errors import ConfigError


def local_cluster(workers: int, ps: int = 0) -> ClusterSpec:
    """Returns a cluster on this machine, on free ports.

    Args:
        workers: Number of training tasks, at least 1. With parameter servers a chief comes on top.
        ps: Number of parameter servers.
    """
    if workers < 1 or ps < 0:
        raise ConfigError(
            f"A cluster needs at least 1 worker and 0 or more parameter servers. Received: workers={workers}, ps={ps}."
        )
    counts = {"chief": 1 if ps else 0, "worker": workers, "ps": ps}
    ports = iter(free_ports(sum(counts.values())))
    return ClusterSpec({job: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for job, count in counts.items()})


def on_free_ports(cluster: ClusterSpec) -> ClusterSpec:
    """Returns a cluster of the same tasks on other ports, which are free on this machine."""
    ports = iter(free_ports(len(cluster.tasks())))
    hosts = {job: [address.rpartition(":")[0] for address in addresses] for job, addresses in cluster.jobs.items()}
    return ClusterSpec({job: [f"{host}:{next(ports)}" for host in each] for job, each in hosts.items()})


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nobody listens on.

    They lie below the range from which the kernel picks ports for outgoing connections: a port from that range may
    be taken again before the task that it is meant for has started.
    """
    ports: list[int] = []
    candidates = random.SystemRandom().sample(range(10000, 32000), 2000)
    for port in candidates:
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ConfigError(f"No {count} free ports between 10000 and 32000 on this machine; {len(ports)} were found.")
