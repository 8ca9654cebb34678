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
_NO_SERVER = "Could not start gRPC server"  # in the message of TensorFlow's error, whose type varies


def encode_greeting(cluster: ClusterSpec, task: TaskSpec) -> str:
    """Returns the first line of a task's greeting: a checksum of its cluster's addresses, and its name."""
    return f"tfdist {hashlib.sha256(repr(cluster).encode()).hexdigest()[:16]} {task}"


@contextlib.contextmanager
def listening_for_peers(cluster: ClusterSpec, task: TaskSpec) -> Iterator[None]:
    """Listens at the task's own address and sends the greeting; afterwards the port is free for TensorFlow.

    Raises:
        ClusterError: The port is taken (the error names the process if the system reports it), or only root may use it.
    """
    try:
        listener = _listen(split_address(cluster.address(task))[1])
    except OSError as e:
        raise _port_error(cluster, task, e) from None
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
    """Raises an error that names the port and its owner if TensorFlow's server, started within the context, cannot listen. TensorFlow names neither.

    Raises:
        ClusterError: Another process has taken the port since `listening_for_peers` released it.
    """
    try:
        yield
    except Exception as e:
        if _NO_SERVER not in str(e):
            raise
        raise _port_error(cluster, task) from e


def _port_error(cluster: ClusterSpec, task: TaskSpec, error: OSError | None = None) -> ClusterError:
    """Returns the error of a task that cannot listen at its port; `error` is the system's, None if the port is taken."""
    address = cluster.address(task)
    port = split_address(address)[1]
    if error is None or error.errno == errno.EADDRINUSE:
        why = f"is taken{_port_owner(port)}. End that process, or"
    else:
        why = f"is not available ({(error.strerror or str(error)).lower()});"
    return ClusterError(f"{task} cannot listen at {address}: port {port} {why} give the task another port.")


def _listen(port: int) -> socket.socket:
    """Returns a socket that listens at a port of all addresses, IPv6 and IPv4 where the host has both.

    Raises:
        OSError: The port is not available.
    """
    error = OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    for family, any_address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as e:  # the host does not support this address family
            error = e
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((any_address, port))
            listener.listen(128)
            return listener
        except OSError as e:
            listener.close()
            error = e
            if e.errno == errno.EADDRINUSE:
                break
    raise error


def _port_owner(port: int) -> str:
    """Returns ` by pid 4711 (python serve.py)` if the system reports the process that listens at a port; else an empty text."""
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
