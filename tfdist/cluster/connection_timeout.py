"""Timeouts of the TCP connections between a cluster's tasks, long enough to survive a short network outage.

gRPC closes a connection if sent bytes are not acknowledged for 20 s (`TCP_USER_TIMEOUT`). The calls in flight then fail permanently,
even if the link recovers a moment later. TensorFlow cannot configure this timeout of gRPC, but a thread can set the option on an open socket.
Only Linux has the option.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import threading
import time

from tfdist.cluster.spec import ClusterSpec, split_address

# Longer than any outage that a connection survives: gRPC's servers close a connection when a ping stays unanswered for a minute.
TIMEOUT_SECONDS = 180.0
_LOOK_EVERY = 5.0  # seconds; well below gRPC's 20 s, so that new connections are extended in time
# After a loss the kernel retransmits after 0.2 s, and doubles each further pause. After an outage of 55 s the next attempt is at 102 s,
# later than gRPC's minute. Linux 6.15 has an option that limits these pauses; `socket` has no name for it yet.
_TCP_RTO_MAX_MS = 44
_LONGEST_PAUSE_MS = 5000
_DESCRIPTORS = pathlib.Path("/proc/self/fd")
_ports: set[int] = set()  # of tasks whose connections get the longer timeout


def keep_connections(cluster: ClusterSpec) -> None:
    """Extends the timeout of this process's present and future connections with a cluster's tasks, until the process ends.

    A connection with a task is recognized by the task's port at either end.
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
    """Extends the timeout of this process's TCP connections that have one of `ports` at either end; returns their number."""
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
