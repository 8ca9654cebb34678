"""Streams of bytes between the ranks of `tcp`, which survive broken connections. Does not import TensorFlow.

A connection can break although both processes live: a firewall forgets it, or the network is gone for longer than the kernel waits. Then
the rank with the higher number connects again, each tells the other how many bytes of the stream it has received, and the stream goes
on from there. For that a rank keeps the bytes that the other may not have received. A process that has died is known by its
port, which refuses connections.
"""

from __future__ import annotations

import array
import collections
import fcntl
import select
import socket
import termios
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from tfdist.collectives import tcp_door
from tfdist.collectives.tcp_door import Door, Hello
from tfdist.runtime.end import hooks
from tfdist.runtime.report.phase import main as phases

_AT_ONCE = 1 << 20  # bytes of one read or write: what stays in a core's cache until it is added
# A kernel gives a connection up if bytes are not acknowledged for this time. A connection in its place is there a second after the network
# is, while TCP's own next attempt may be as far away as the outage was long.
_SILENT_SECONDS = 20
_CONNECT_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_TELL_SECONDS = 1.0
_ALL: weakref.WeakSet[Streams] = weakref.WeakSet()
Done = Callable[[], None]


class Stream:
    """The bytes to and from one other rank.

    Attributes:
        peer: The other rank.
        connection: None if it is broken.
        sent: How many bytes the kernel has taken, of all calls.
        received: How many bytes were read, of all calls.
    """

    def __init__(self, peer: int, connection: socket.socket):
        self.peer = peer
        self.sent = 0
        self.received = 0
        self._outgoing: collections.deque[memoryview] = collections.deque()
        self._incoming: collections.deque[tuple[memoryview, Done | None]] = collections.deque()
        self._kept: collections.deque[memoryview] = collections.deque()  # the last of the sent bytes
        self._early = bytearray()  # read from a broken connection before somebody expected it
        self.connection: socket.socket | None = None
        self.connect(connection, 0)

    def connect(self, connection: socket.socket, received_by_peer: int) -> None:
        """Continues over a new connection, with the byte that the peer needs next."""
        again = self.sent - received_by_peer
        if again > sum(map(len, self._kept)):
            raise ConnectionError(f"rank {self.peer} lost bytes that are no longer kept")
        while again > 0:
            last = self._kept.pop()
            if len(last) > again:
                self._kept.append(last[:-again])
                last = last[-again:]
            self._outgoing.appendleft(last)
            self.sent -= len(last)
            again -= len(last)
        connection.setblocking(False)
        for level, option, value in _options():
            connection.setsockopt(level, option, value)
        self.connection = connection

    def disconnect(self) -> None:
        """Leaves a broken connection after reading all that had arrived on it: the peer's kernel takes that for received."""
        connection = self.connection
        if connection is None:
            return
        try:
            while content := connection.recv(_AT_ONCE):
                self._early += content
                self.received += len(content)
        except OSError:  # nothing more has arrived, or the error for which it is broken
            pass
        connection.close()
        self.connection = None

    def send(self, view: memoryview) -> None:
        """Adds bytes to send. They must not change until the call ends."""
        if len(view):
            self._outgoing.append(view)

    def expect(self, view: memoryview, done: Done | None = None) -> None:
        """Adds a place for the next bytes to arrive; calls `done` when it is full."""
        if len(view):
            self._incoming.append((view, done))
        elif done:
            done()

    @property
    def wants(self) -> int:
        """The events to poll for; 0 when all is sent and received."""
        reads = select.POLLIN if self._incoming else 0
        writes = select.POLLOUT if self._outgoing else 0
        return reads | writes

    @property
    def waits(self) -> bool:
        """Whether bytes of the peer are still to arrive."""
        return bool(self._incoming)

    def read(self) -> Done | None:
        """Reads the bytes that have arrived, at most a piece. Returns the function to call now; raises OSError for a broken connection."""
        view, done = self._incoming[0]
        if self._early:
            count = min(len(view), len(self._early))
            view[:count] = self._early[:count]
            del self._early[:count]
        elif self.connection is None:
            return None
        else:
            count = self.connection.recv_into(view[:_AT_ONCE])
            if not count:
                raise ConnectionResetError("the connection was closed")
            self.received += count
        if count < len(view):
            self._incoming[0] = (view[count:], done)
            return None
        self._incoming.popleft()
        return done

    def read_early(self) -> None:
        """Reads the bytes that a broken connection has left."""
        while self._early and self._incoming:
            done = self.read()
            if done:
                done()

    def write(self) -> None:
        """Sends as much as the kernel takes, at most a piece. Raises OSError for a broken connection."""
        if self.connection is None:
            return
        view = self._outgoing[0]
        count = self.connection.send(view[:_AT_ONCE], socket.MSG_NOSIGNAL)
        self.sent += count
        self._kept.append(view[:count])
        if count < len(view):
            self._outgoing[0] = view[count:]
        else:
            self._outgoing.popleft()

    def settle(self) -> None:
        """Keeps a copy of the bytes that may have to be sent again, as the arrays of the call may change after it."""
        left = self._unacknowledged()
        tail = list[memoryview]()
        while left > 0 and self._kept:
            last = self._kept.pop()
            tail.append(last[-left:])
            left -= len(tail[-1])
        self._kept.clear()
        if tail:
            self._kept.append(memoryview(b"".join(reversed(tail))))

    def _unacknowledged(self) -> int:
        """Returns how many of the sent bytes the peer's kernel has not acknowledged. The others the peer reads even from a broken connection."""
        if self.connection is None:
            return sum(map(len, self._kept))
        answer = array.array("i", [0])
        fcntl.ioctl(self.connection, termios.TIOCOUTQ, answer)
        return answer[0]


class Streams:
    """A stream to each other rank.

    In a process whose waits are not watched, `timeout_seconds` limits the wait for a rank; 0 means no limit. Broken connections are
    opened again for as long, at `addresses`, with a hello that has `token`. `last` are the bytes with which a rank ends.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        timeout_seconds: float = 0,
        door: Door | None = None,
        addresses: Sequence[str] = (),
        token: bytes = b"",
        last: bytes = b"",
    ):
        self.of = {peer: Stream(peer, connection) for peer, connection in connections.items()}
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._door = door
        self._addresses = addresses
        self._token = token
        self._asked: dict[int, socket.socket] = {}  # connections by which this rank has asked others to connect again
        self._error = ""  # why no further call is possible
        # Runs when the interpreter exits, too: a rank that exits normally must not look lost.
        self._finalizer = weakref.finalize(self, _say, list(self.of.values()), last)
        _ALL.add(self)

    def run(self) -> None:
        """Sends and receives all that was added to the streams.

        Raises:
            ConnectionError: A rank has died or given up, or stayed out of reach for too long; or `shut` was called.
            TimeoutError: A rank has not taken part in time.
        """
        poll = select.poll()
        watched: dict[int, int] = {}
        streams: dict[int, Stream] = {}
        limit = self._limit()
        while True:
            self.check()
            wanted = self._wanted(streams)
            if not wanted:
                break
            # Somebody who connects may replace a connection that still looks sound here.
            for number in self._door.descriptors() if self._door else ():
                wanted[number] = select.POLLIN
            for number in watched.keys() - wanted.keys():
                poll.unregister(number)
            for number, events in wanted.items():
                if watched.get(number) != events:
                    poll.register(number, events)
            watched = wanted
            ready = poll.poll(None if limit is None else max(0.0, 1000 * (limit - time.monotonic())))
            if not ready:
                self._time_out()
            for number, events in ready:
                stream = streams.get(number)
                if stream is None:
                    self._answer_door()
                    break  # the descriptors may have changed
                if not self._work(stream, events):
                    poll.unregister(number)
                    del watched[number]
            limit = self._limit()
        for stream in self.of.values():
            stream.settle()

    def _wanted(self, streams: dict[int, Stream]) -> dict[int, int]:
        """Returns the events to poll for, and puts the streams of their descriptors into `streams`. Opens broken connections again."""
        wanted = {}
        streams.clear()
        for stream in self.of.values():
            if stream.connection is None:
                # Also if this rank needs nothing of it: the other may wait for a byte of an earlier call.
                self._mend(stream)
            stream.read_early()
            if stream.wants and stream.connection is not None:
                wanted[stream.connection.fileno()] = stream.wants
                streams[stream.connection.fileno()] = stream
        return wanted

    def _work(self, stream: Stream, events: int) -> bool:
        """Reads and writes as much as is possible; returns whether the connection is sound."""
        done = None
        try:
            if events & ~select.POLLOUT and stream.waits:
                done = stream.read()
        except BlockingIOError:
            pass
        except OSError:
            stream.disconnect()
            return False
        if done:
            done()
        try:
            if events & ~select.POLLIN and stream.wants & select.POLLOUT:
                stream.write()
        except BlockingIOError:
            pass
        except OSError:
            stream.disconnect()
            return False
        return True

    def _limit(self) -> float | None:
        if self._timeout_seconds and not phases.watched:
            return time.monotonic() + self._timeout_seconds
        return None

    def _time_out(self) -> None:
        missing = [stream.peer for stream in self.of.values() if stream.wants]
        names = ", ".join(map(str, missing))
        error = f"rank {names} did not take part within {self._timeout_seconds:g} seconds"
        self.abort(missing[0], error)
        raise TimeoutError(error)

    def _mend(self, stream: Stream) -> None:
        """Waits for a connection in place of a broken one. Of two ranks the one with the higher number opens it.

        Raises:
            ConnectionError: The rank has died, or could not be reached in time.
        """
        peer = stream.peer
        limit = time.monotonic() + self._timeout_seconds if self._timeout_seconds else None
        while stream.connection is None:
            self._answer_door()  # tells of a rank that has given up, too
            self.check()
            if stream.connection is not None:
                return
            if self._door is None:
                raise self._give_up(peer, f"rank {peer} has died")
            try:
                if self._rank > peer:
                    self._open(stream)
                else:
                    self._ask(peer)
            except ConnectionRefusedError:
                raise self._give_up(peer, f"rank {peer} has died") from None
            except OSError:  # the network is still away
                time.sleep(_RETRY_SECONDS)
            if limit is not None and time.monotonic() > limit:
                error = f"rank {peer} could not be reached for {self._timeout_seconds:g} seconds"
                raise self._give_up(peer, error)

    def _open(self, stream: Stream) -> None:
        """Connects to a rank with a lower number again. It answers when it is in a call; until then other ranks are answered here."""
        hello = Hello(tcp_door.RESUME, self._rank, stream.received)
        connection = tcp_door.call(self._addresses[stream.peer], hello, self._token, _CONNECT_SECONDS)
        try:
            answer = None
            while answer is None:
                self._answer_door()
                self.check()
                answer = tcp_door.receive(connection, self._token, _RETRY_SECONDS)
            stream.connect(connection, answer.number)
        except BaseException:
            connection.close()
            raise

    def _ask(self, peer: int) -> None:
        """Asks a rank with a higher number to connect again, as it may take its connection for sound. Raises OSError."""
        asked = self._asked.get(peer)
        if asked is None:
            hello = Hello(tcp_door.ASK, self._rank)
            self._asked[peer] = tcp_door.call(self._addresses[peer], hello, self._token, _CONNECT_SECONDS)
            return
        poll = select.poll()
        poll.register(asked, select.POLLIN)
        for number in self._door.descriptors() if self._door else ():
            poll.register(number, select.POLLIN)
        ready = dict(poll.poll(1000 * _RETRY_SECONDS))
        if asked.fileno() in ready:  # it has ended, or has answered by closing
            self._asked.pop(peer).close()
            time.sleep(_RETRY_SECONDS / 10)

    def _answer_door(self) -> None:
        """Answers ranks that have connected."""
        for hello, connection in self._door.take() if self._door else ():
            stream = self.of.get(hello.rank)
            if hello.kind == tcp_door.LOST:
                connection.close()
                self._learn(hello.rank, hello.number)
            elif stream is None:
                connection.close()
            elif hello.kind == tcp_door.RESUME and hello.rank > self._rank:
                stream.disconnect()
                connection.send(Hello(tcp_door.RESUME, self._rank, stream.received).pack(self._token))
                stream.connect(connection, hello.number)
                if hello.rank in self._asked:
                    self._asked.pop(hello.rank).close()
            else:
                connection.close()
                if hello.kind == tcp_door.ASK and hello.rank < self._rank:
                    stream.disconnect()

    def _learn(self, peer: int, cause: int) -> None:
        if cause == peer:
            raise self._give_up(peer, f"rank {peer} has given up after an error")
        raise self._give_up(cause, f"rank {cause} is lost, as rank {peer} reports")

    def check(self) -> None:
        """Raises ConnectionError if no further call is possible."""
        if self._error:
            raise ConnectionError(self._error)

    def _give_up(self, cause: int, error: str) -> ConnectionError:
        self.abort(cause, error)
        return ConnectionError(error)

    def abort(self, cause: int, error: str) -> None:
        """Ends the streams after an error. The other ranks learn which rank has caused it, at their doors: within a stream it would stand
        behind bytes that nobody reads."""
        if self._error:
            return
        self._error = error
        self._tell([peer for peer in self.of if peer != cause], Hello(tcp_door.LOST, self._rank, cause))
        self._shut_down()

    def _tell(self, peers: Sequence[int], hello: Hello) -> None:
        if self._door is None:
            return
        limit = time.monotonic() + _TELL_SECONDS
        for peer in peers:
            seconds = max(0.05, limit - time.monotonic())
            try:
                tcp_door.call(self._addresses[peer], hello, self._token, seconds).close()
            except OSError:  # it has ended, too, or the network is away
                pass

    def shut(self) -> None:
        """Ends the streams; a `run` in another thread raises ConnectionError."""
        if not self._error:
            self._error = "the transport was closed"
            self._finalizer()
            self._shut_down()

    def _shut_down(self) -> None:
        for stream in self.of.values():
            if stream.connection is not None:
                try:
                    stream.connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the peer has exited
                    pass

    def release(self) -> None:
        """Closes the sockets. No thread may be in a call."""
        self._finalizer.detach()
        for asked in self._asked.values():
            asked.close()
        for stream in self.of.values():
            if stream.connection is not None:
                stream.connection.close()
        if self._door is not None:
            self._door.close()


def _say(streams: Sequence[Stream], last: bytes) -> None:
    """Sends last bytes where no call is under way."""
    for stream in streams:
        if stream.connection is not None and not stream.wants:
            try:
                stream.connection.send(last, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:  # the peer has exited
                pass


def _options() -> list[tuple[int, int, int]]:
    tcp = socket.IPPROTO_TCP
    found = [(tcp, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        found += [
            (tcp, socket.TCP_USER_TIMEOUT, 1000 * _SILENT_SECONDS),
            (tcp, socket.TCP_KEEPIDLE, _SILENT_SECONDS // 2),
            (tcp, socket.TCP_KEEPINTVL, _SILENT_SECONDS // 4),
        ]
    return found


def _close_in_child() -> None:
    # A forked child would keep a dead rank's sockets open. This closes only the child's copies.
    for streams in list(_ALL):
        streams._error = "the transport belongs to the process that has forked this one"
        streams.release()


hooks.in_child(_close_in_child)
