"""The greeting of a task: it names its cluster, itself and its versions to every peer that connects before TensorFlow starts.

No TensorFlow here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import threading
from collections.abc import Iterator

from tfdist.cluster import task_versions
from tfdist.cluster.spec import ClusterSpec, TaskSpec, split_address
from tfdist.errors import ClusterError, truncate

PREFIX = b"tfdist "
MAX_BYTES = 4096  # of a greeting
_NO_SERVER = "Could not start gRPC server"  # TensorFlow's error; of a type that varies


def encode_greeting(cluster: ClusterSpec, task: TaskSpec) -> str:
    """Returns the first line of a task's greeting: a checksum of its cluster's addresses, and its name."""
    return f"tfdist {hashlib.sha256(repr(cluster).encode()).hexdigest()[:16]} {task}"


@contextlib.contextmanager
def listening_for_peers(cluster: ClusterSpec, task: TaskSpec) -> Iterator[None]:
    """Listens at the task's own address and sends the greeting; afterwards the port is free for TensorFlow.

    Raises:
        ClusterError: The port is taken, by another process that is named if the system tells, or only root may use it.
    """
    try:
        listener = _listen(_port(cluster, task))
    except OSError as e:
        taken = e.errno == errno.EADDRINUSE
        raise _port_error(cluster, task, "" if taken else (e.strerror or str(e)).lower()) from None
    greeting = encode_greeting(cluster, task).encode() + b"\n" + task_versions.encode() + b"\n"

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(greeting)

    threading.Thread(target=answer, daemon=True, name="tfdist-preflight").start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()


@contextlib.contextmanager
def naming_port_owner(cluster: ClusterSpec, task: TaskSpec) -> Iterator[None]:
    """Names the port and its owner where TensorFlow's server, which is started inside, cannot listen. TensorFlow names neither.

    Raises:
        ClusterError: Another process has taken the port since `listening_for_peers` has left it.
    """
    try:
        yield
    except Exception as e:
        if _NO_SERVER not in str(e):
            raise
        raise _port_error(cluster, task) from e


def _port(cluster: ClusterSpec, task: TaskSpec) -> int:
    return split_address(cluster.address(task))[1]


def _port_error(cluster: ClusterSpec, task: TaskSpec, reason: str = "") -> ClusterError:
    """Returns the error of a task that cannot listen at its port, as the port is taken unless a reason is given."""
    port = _port(cluster, task)
    why = f"cannot be had ({reason});" if reason else f"is taken{_port_owner(port)}. End that, or"
    return ClusterError(
        f"{task} cannot listen at {cluster.address(task)}: port {port} {why} give the task another port."
    )


def _listen(port: int) -> socket.socket:
    """Returns a socket that listens at a port of all addresses, IPv6 and IPv4 where the host has both.

    Raises:
        OSError: The port is not available.
    """
    error = OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    for family, place in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as e:  # no such addresses here
            error = e
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((place, port))
            listener.listen(128)
            return listener
        except OSError as e:
            listener.close()
            error = e
            if e.errno == errno.EADDRINUSE:
                break
    raise error


def _port_owner(port: int) -> str:
    """Returns ` by pid 4711 (python serve.py)` where the system tells who listens at a port."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                process = psutil.Process(connection.pid)
                command = " ".join(" ".join(process.cmdline()).split()) or process.name()  # in one line
                return f" by pid {process.pid} ({truncate(command)})"
    except (psutil.Error, OSError):
        pass
    return ""
