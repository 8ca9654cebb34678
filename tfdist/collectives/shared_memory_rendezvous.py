"""The rendezvous of the processes of one host, which get shared memory and a socket between any two. Does not import TensorFlow.

The memory has no name in a file system: rank 0 sends its descriptor through the sockets. So a small /dev/shm (64 MB in Docker) does not matter.
While the ranks connect, the sockets are in temporary folders that other users cannot enter. Containers share memory if they
share a network namespace and the folder for temporary files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import pathlib
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

from tfdist.collectives.buffer_transport import NoTransportError, Store
from tfdist.runtime.files import WriteError
from tfdist.runtime.folders import temporary

_HELLO = struct.Struct("<32sI")  # a token that only the store publishes, and the sender's rank
_CREDENTIALS = struct.Struct("iII")
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


def meet(store: Store, memory_bytes: int) -> tuple[mmap.mmap, dict[int, socket.socket]]:
    """Returns memory that all ranks share, of rank 0's `memory_bytes`, and a socket to each other rank. All ranks call it.

    Raises:
        NoTransportError: The ranks cannot share memory; the message is equal on all ranks.
    """
    with contextlib.ExitStack() as stack:
        sockets: dict[int, socket.socket] = {}
        stack.callback(_close, sockets)
        reason = ""
        memory = None
        try:
            memory = _join(store, memory_bytes, sockets)
        except NoTransportError as e:
            reason = str(e)
        except OSError as e:
            reason = f"rank {store.rank}: {e}"
        reason = _agree(store, reason)
        if reason or memory is None:
            raise NoTransportError(reason)
        stack.pop_all()
        return memory, sockets


def _join(store: Store, memory_bytes: int, sockets: dict[int, socket.socket]) -> mmap.mmap:
    """Connects this rank with all others, whose sockets it adds to `sockets`; returns the shared memory.

    A rank that cannot take part publishes its reason in place of an address, so that the others need not wait for its connection.
    """
    rank = store.rank
    size = store.size
    own_entry: dict[str, Any] = {"size": size, "host": host_key(), "user": os.geteuid(), "token": secrets.token_hex(16)}
    descriptor = -1
    listener = None
    with contextlib.ExitStack() as stack:
        try:
            if sys.platform != "linux":
                raise NoTransportError(f"shared memory needs Linux; this is {sys.platform}")
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            own_entry["folder"] = stack.enter_context(temporary.temporary_folder())
            with _short(own_entry["folder"]) as path:
                listener.bind(path)
            listener.listen(size)
            if rank == 0:
                descriptor = reserve(memory_bytes)
                stack.callback(os.close, descriptor)
        except (NoTransportError, OSError, WriteError) as e:
            own_entry["reason"] = f"rank {rank}: {e}"
        store.put(f"address/{rank}", json.dumps(own_entry))
        limit = time.monotonic() + store.seconds
        addresses = []
        for other in range(size):
            text = _get(store, f"address/{other}", _seconds_left(limit), f"rank {other} is not there")
            addresses.append(json.loads(text))
        _compare(addresses)
        if listener is None:
            raise NoTransportError(own_entry["reason"])
        # Each rank connects to all lower ranks before it accepts the higher ones. A connection waits in the backlog of the listener,
        # so no rank waits for another one that connects, and the replies come last.
        limit = time.monotonic() + store.seconds
        for other in range(rank):
            sockets[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _greet(sockets[other], other, addresses[other], store)
        while len(sockets) < size - 1:
            _accept(listener, own_entry["token"], store, limit, descriptor, sockets)
        for other in range(rank):
            sockets[other].settimeout(_seconds_left(limit))
            received = _receive_reply(sockets[other], stack)
            if other == 0:
                descriptor = received
        for connection in sockets.values():
            connection.settimeout(None)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, flags)


def _greet(connection: socket.socket, other: int, address: dict[str, Any], store: Store) -> None:
    """Connects to a lower rank, and sends it that rank's token and this rank."""
    connection.settimeout(store.seconds)
    try:
        with _short(address["folder"]) as path:
            connection.connect(path)
    except OSError as e:
        raise NoTransportError(f"rank {store.rank} cannot reach rank {other} by a socket of its host: {e}") from e
    if _user(connection) != os.geteuid():
        raise NoTransportError(f"rank {store.rank} found a process of another user at the address of rank {other}")
    connection.send(_HELLO.pack(address["token"].encode(), store.rank), socket.MSG_NOSIGNAL)


@contextlib.contextmanager
def _short(folder: str) -> Iterator[str]:
    """Yields a short path of the socket in a folder, because a socket's path may have at most 107 characters."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


def host_key() -> str:
    """Returns a key that is equal for processes that can share memory."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/net')}"  # socket names are known only within a network namespace
    except OSError:
        return boot


def reserve(size: int) -> int:
    """Returns the descriptor of new memory. It is allocated now and cannot shrink: access to a missing page would kill the process."""
    descriptor = os.memfd_create("tfdist", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as e:
        os.close(descriptor)
        raise NoTransportError(f"no memory of {size} bytes: {e}") from e
    return descriptor


def _compare(addresses: list[dict[str, Any]]) -> None:
    for other, address in enumerate(addresses):
        for key, what in [("size", "number of ranks"), ("host", "host or network namespace"), ("user", "user")]:
            if address[key] != addresses[0][key]:
                raise NoTransportError(f"rank {other} has another {what} than rank 0")
    for address in addresses:
        if "reason" in address:
            raise NoTransportError(address["reason"])


def _accept(
    listener: socket.socket,
    token: str,
    store: Store,
    limit: float,
    descriptor: int,
    sockets: dict[int, socket.socket],
) -> None:
    """Accepts a connection from a higher rank and replies; the reply of rank 0 carries the memory's descriptor."""
    rank = store.rank
    size = store.size
    missing = ", ".join(str(other) for other in range(rank + 1, size) if other not in sockets)
    if not _readable(listener, limit):
        raise NoTransportError(f"rank {missing} has not connected with rank {rank} in time")
    connection = listener.accept()[0]
    try:
        if _user(connection) != os.geteuid() or not _readable(connection, limit):
            return
        hello = connection.recv(_HELLO.size, socket.MSG_DONTWAIT)
        if len(hello) != _HELLO.size:
            return
        sender, other = _HELLO.unpack(hello)
        if sender == token.encode() and rank < other < size and other not in sockets:
            descriptors = [descriptor] if rank == 0 else []
            socket.send_fds(connection, [b"welcome"], descriptors, socket.MSG_NOSIGNAL)
            sockets[other] = connection
    finally:
        if connection not in sockets.values():
            connection.close()


def _readable(connection: socket.socket, limit: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(_seconds_left(limit) * 1000))


def _receive_reply(connection: socket.socket, stack: contextlib.ExitStack) -> int:
    text, descriptors, _, _ = socket.recv_fds(connection, 16, 1, socket.MSG_CMSG_CLOEXEC)
    for number in descriptors:
        stack.callback(os.close, number)
    if text != b"welcome":
        raise NoTransportError("a rank has ended while they connected")
    return descriptors[0] if descriptors else -1


def _user(connection: socket.socket) -> int:
    """Returns the user ID of the peer's process, from the kernel."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


def _agree(store: Store, reason: str) -> str:
    """Returns why a rank cannot take part, or an empty text. Rank 0 decides, so that all ranks return the same text."""
    if store.rank:
        store.put(f"found/{store.rank}", json.dumps(reason))
        try:
            # Rank 0 may need `store.seconds` each for addresses, connections and reports.
            return str(json.loads(_get(store, "verdict", 4 * store.seconds, "rank 0 has not decided in time")))
        except NoTransportError as e:
            return reason or str(e)
    limit = time.monotonic() + store.seconds
    try:
        for other in range(1, store.size):
            if not reason:
                text = _get(store, f"found/{other}", _seconds_left(limit), f"rank {other} has not reported in time")
                reason = json.loads(text)
    except NoTransportError as e:
        reason = str(e)
    store.put("verdict", json.dumps(reason))
    return reason


def _get(store: Store, key: str, seconds: float, otherwise: str) -> str:
    try:
        return store.get(key, seconds)
    except Exception as e:  # the type depends on the store
        raise NoTransportError(f"{otherwise}: {e}") from e


def _seconds_left(limit: float) -> float:
    return max(0.001, limit - time.monotonic())


def _close(sockets: dict[int, socket.socket]) -> None:
    for connection in sockets.values():
        connection.close()
