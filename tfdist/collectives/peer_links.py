"""Sockets between the ranks of one host, which report each rank's progress and, at once, its death.

Does not import TensorFlow. The kernel closes the sockets of a process that dies, so no rank waits for a dead process. Waiting is
a system call: it uses no processor time, and other Python threads run meanwhile.
"""

from __future__ import annotations

import collections
import select
import socket
import struct
import time
import weakref
from collections.abc import Mapping

from tfdist.runtime.end import hooks
from tfdist.runtime.report.phase import main as phases

_MESSAGE = struct.Struct("<II")  # the point's number and the call's signature; or one of these two kinds and a rank:
_CLOSED = 0xFFFFFFFF  # the sender closes without an error
_LOST = 0xFFFFFFFE  # the sender gives up because of this rank
_POINTS = 0x80000000
_ALL: weakref.WeakSet[PeerLinks] = weakref.WeakSet()


class PeerLinks:
    """A connected socket of type SOCK_SEQPACKET to each other rank.

    In a process whose waits are not watched, `timeout_seconds` limits each wait; 0 means no limit.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout_seconds: float = 0):
        self._rank = rank
        self._sockets = dict(sockets)
        self._timeout_seconds = timeout_seconds
        self._arrived: dict[int, collections.deque[bytes]] = {peer: collections.deque() for peer in sockets}
        self._expected: collections.deque[bytes] = collections.deque()
        self._posted = 0
        self._closed_peers: set[int] = set()
        self._error = ""  # why no further call is possible
        self._peers = {connection.fileno(): peer for peer, connection in sockets.items()}
        self._poll = select.poll()
        for number in self._peers:
            self._poll.register(number, select.POLLIN)
        # Runs when the interpreter exits, too: a rank that exits normally must not look lost.
        self._finalizer = weakref.finalize(self, _notify, list(self._sockets.values()), _CLOSED, rank)
        _ALL.add(self)

    def post(self, signature: int) -> None:
        """Notifies the other ranks that this rank has reached its next point. The signature is a checksum of the call, of 32 bits."""
        message = _MESSAGE.pack(self._posted % _POINTS, signature)
        self._posted += 1
        self._expected.append(message)
        for connection in self._sockets.values():
            _send(connection, message)

    def wait(self) -> None:
        """Waits until all ranks have reached the next point: the first `wait` is for the point of the first `post`, and so on.

        Raises:
            ConnectionError: A rank has died, ended or given up; or `shut` was called.
            TimeoutError: A rank has not reached the point in time.
            RuntimeError: A rank made a different call.
        """
        bounded = self._timeout_seconds and not phases.watched
        limit = time.monotonic() + self._timeout_seconds if bounded else None
        while missing := [peer for peer, arrived in self._arrived.items() if not arrived]:
            self.check()
            gone = self._closed_peers.intersection(missing)
            if gone:
                raise self._give_up(min(gone), f"rank {min(gone)} has ended")
            ms_left = None if limit is None else 1000 * max(0, limit - time.monotonic())
            ready = self._poll.poll(ms_left)
            if not ready and ms_left == 0:
                names = ", ".join(map(str, missing))
                error = f"rank {names} did not take part within {self._timeout_seconds:g} seconds"
                self._give_up(missing[0], error)
                raise TimeoutError(error)
            for number, _ in ready:
                self._receive(self._peers[number])
        expected = self._expected.popleft()
        for peer, arrived in self._arrived.items():
            if arrived.popleft() != expected:
                error = f"rank {peer} called another collective, or one of another size or type, than rank {self._rank}"
                self._give_up(self._rank, error)
                raise RuntimeError(error)

    def check(self) -> None:
        """Raises ConnectionError if no further call is possible."""
        if self._error:
            raise ConnectionError(self._error)

    def _receive(self, peer: int) -> None:
        try:
            message = self._sockets[peer].recv(_MESSAGE.size, socket.MSG_DONTWAIT)
        # Reset: the peer has closed without reading everything; its last messages can still be received.
        except (BlockingIOError, ConnectionResetError):
            return
        except OSError:
            message = b""
        self.check()  # after `shut`, all peers look closed
        if not message:  # the peer has closed its socket, or its process has died
            if peer not in self._closed_peers:
                raise self._give_up(peer, f"rank {peer} has died")
            self._poll.unregister(self._sockets[peer])
            return
        kind, value = _MESSAGE.unpack(message)
        if kind == _CLOSED:
            self._closed_peers.add(peer)
        elif kind != _LOST:
            self._arrived[peer].append(message)
        elif value == peer:
            raise self._give_up(value, f"rank {value} has given up after an error")
        else:
            raise self._give_up(value, f"rank {value} is lost, as rank {peer} reports")

    def _give_up(self, cause: int, error: str) -> ConnectionError:
        self.abort(cause, error)
        return ConnectionError(error)

    def abort(self, cause: int, error: str) -> None:
        """Ends the links after an error, as the ranks are no longer at the same point. The other ranks receive the rank that caused it."""
        if not self._error:
            self._error = error
            self._end(_LOST, cause)

    def shut(self) -> None:
        """Ends the links; a `wait` in another thread raises ConnectionError."""
        if not self._error:
            self._error = "the transport was closed"
            self._end(_CLOSED, self._rank)

    def release(self) -> None:
        """Closes the sockets. No thread may be waiting."""
        self._finalizer.detach()
        for connection in self._sockets.values():
            connection.close()

    def _end(self, kind: int, value: int) -> None:
        _notify(list(self._sockets.values()), kind, value)
        for connection in self._sockets.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # the peer has exited
                pass


def _notify(sockets: list[socket.socket], kind: int, value: int) -> None:
    for connection in sockets:
        _send(connection, _MESSAGE.pack(kind, value))


def _send(to: socket.socket, message: bytes) -> None:
    try:
        to.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:  # the peer has exited; its earlier messages can still be read
        pass


def _close_in_child() -> None:
    # A forked child would keep a dead rank's sockets open. This closes only the child's copies.
    for links in list(_ALL):
        links._error = "the transport belongs to the process that has forked this one"
        links.release()


hooks.in_child(_close_in_child)
