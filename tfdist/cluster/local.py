"""A cluster on this machine, on free ports. No TensorFlow here."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import os
import random
import socket
import struct

from tfdist.cluster.spec import ClusterSpec
from tfdist.errors import ConfigError
from tfdist.runtime.folders import temporary

_MOST_HELD = 100  # ports that this process keeps reserved: those that it returned last
_LOCK = struct.Struct("hhqqi4x")  # `struct flock`: type, whence, start, length, process
_held: collections.deque[int] = collections.deque()  # descriptors


def local_cluster(workers: int, ps: int = 0) -> ClusterSpec:
    """Returns a cluster on this machine, on free ports.

    Args:
        workers: Number of training tasks, at least 1. With parameter servers the cluster has a chief as well.
        ps: Number of parameter servers.

    Examples:
        >>> import tfdist.cluster
        >>> len(tfdist.cluster.local_cluster(workers=2).tasks())
        2
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
    return ClusterSpec({job: [f"{host}:{next(ports)}" for host in hosts_of_job] for job, hosts_of_job in hosts.items()})


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nobody listens on.

    The ports lie below the range from which the kernel picks ports for outgoing connections: a port from that range may
    be taken before its task has started. The last 100 ports stay reserved until this process ends: other processes of
    this user do not get them from `free_ports`.

    Examples:
        >>> import tfdist.cluster
        >>> len(set(tfdist.cluster.free_ports(2)))
        2
    """
    ports: list[int] = []
    holders: list[int] = []
    candidates = random.SystemRandom().sample(range(10000, 32000), 2000)
    for port in candidates:
        # Reserved before the test: of two processes that find the same port free, one gets it.
        holder = _hold(port) if len(holders) < _MOST_HELD else -1
        if holder is None:
            continue
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                _close(holder)
                continue
        holders.append(holder)
        ports.append(port)
        if len(ports) == count:
            _held.extend(holders)
            while len(_held) > _MOST_HELD:
                _close(_held.popleft())
            return ports
    for holder in holders:
        _close(holder)
    raise ConfigError(f"No {count} free ports between 10000 and 32000 on this machine; {len(ports)} were found.")


def _hold(port: int) -> int | None:
    """Reserves a port, so that `free_ports` in other processes of this user skips it; returns None if another process has reserved it.

    Returns:
        The descriptor of a file whose byte at offset `port` is locked; the kernel releases the lock when the process ends. -1 if the
        system has no such locks (only Linux has them), or the user has no private folder.
    """
    folder = temporary.user_folder() if hasattr(fcntl, "F_OFD_SETLK") else None
    if folder is None:
        return -1
    try:
        # Each network namespace has its own ports.
        path = os.path.join(folder, f"ports-{os.stat('/proc/self/ns/net').st_ino}")
        holder = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError:
        return -1
    try:
        fcntl.fcntl(holder, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, port, 1, 0))
    except OSError as e:
        _close(holder)
        return None if e.errno in (errno.EAGAIN, errno.EACCES) else -1
    return holder


def _close(holder: int) -> None:
    with contextlib.suppress(OSError):
        os.close(holder)
