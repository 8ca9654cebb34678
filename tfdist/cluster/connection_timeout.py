"""Keeps the connections between the tasks of a cluster while a link is down for a while.

gRPC closes a connection to a server if sent bytes are not acknowledged for 20 s (`TCP_USER_TIMEOUT`), and the calls in flight fail for
good, also where the link comes back a moment later. TensorFlow passes no setting for that to gRPC, but another thread may change the option of
a socket that is open. Only Linux has it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import threading
import time

from tfdist.cluster.spec import ClusterSpec, split_address

# Beyond what any outage lasts that is survived: gRPC's servers close a connection that leaves a ping unanswered for a minute.
TIMEOUT_SECONDS = 180.0
_LOOK_EVERY = 5.0  # seconds; a new connection must be seen before its 20 s are over
# After a loss the system sends again after 0.2 s, and then after twice the time of before: after an outage of 55 s, at 102 s, when that minute is
# over. Linux 6.15 has a limit for these pauses, which has no name in `socket` yet.
_TCP_RTO_MAX_MS = 44
_LONGEST_PAUSE_MS = 5000
_DESCRIPTORS = pathlib.Path("/proc/self/fd")
_ports: set[int] = set()  # whose connections are kept


def keep_connections(cluster: ClusterSpec) -> None:
    """Keeps this process's connections to and from tasks of a cluster, those to come included, until the process ends.

    Args:
        cluster: The cluster. A connection is one of its tasks' if the port at either end is that of a task.
    """
    started = bool(_ports)
    _ports.update(split_address(cluster.address(task))[1] for task in cluster.tasks())
    if not started and hasattr(socket, "TCP_USER_TIMEOUT") and _DESCRIPTORS.exists():
        threading.Thread(target=_work, daemon=True, name="tfdist-connections").start()


def _work() -> None:
    while True:
        extend_timeouts(frozenset(_ports))
        time.sleep(_LOOK_EVERY)


def extend_timeouts(ports: frozenset[int]) -> int:
    """Extends the timeout of this process's TCP connections of which one end has one of `ports`; returns their number."""
    count = 0
    for path in list(_DESCRIPTORS.iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(path).startswith("socket:"):
                continue
            # A copy: the descriptor belongs to TensorFlow, which may close it at any moment.
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if ports.isdisjoint({connection.getsockname()[1], connection.getpeername()[1]}):
                    continue
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * TIMEOUT_SECONDS))
                count += 1
                connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_PAUSE_MS)
    return count
