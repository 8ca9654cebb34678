"""A transport over TCP sockets, among processes of any hosts. Does not import TensorFlow.

A sum splits the array into one part per rank. Each rank receives its part from all others, piece by piece; as soon as a piece of all
ranks is there it is added, in the order of `tree`, while it is in the core's cache, and sent to all. So every byte crosses the network twice,
whatever the number of ranks, and all ranks have the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfdist.collectives import tcp_door
from tfdist.collectives.buffer_transport import (
    SMALL_BYTES,
    BufferTransport,
    NoTransportError,
    Store,
    aligned_empty,
    check_rows,
    reduce_in_order,
)
from tfdist.collectives.tcp_door import Door, Hello
from tfdist.collectives.tcp_streams import Streams
from tfdist.errors import ConfigError, describe_error

_REACH_SECONDS = 10.0  # limit of a first connection: hosts that cannot reach each other use gRPC soon
_PIECE_BYTES = 1 << 20  # of a sum
# The beginning of a call: its number, what is called, the elements of the array, and a checksum of its type and shape.
_HEADER = struct.Struct("<IIQII")
_METHODS = ("all_reduce", "all_reduce of the largest", "reduce_scatter", "all_gather", "all_to_all", "end")
_NUMBERS = 2**32
_LAST = _HEADER.pack(0, _METHODS.index("end"), 0, 0, 0)


def why_not(rank: int, addresses: Sequence[str]) -> str:
    """Returns why this process cannot use TCP, or an empty text. `addresses` are the `host:port` of each rank."""
    try:
        Door(tcp_door.own_address(rank, addresses)).close()
    except (OSError, ConfigError) as e:
        return f"this host cannot listen for the others: {describe_error(e)}"
    return ""


def connect(
    store: Store, addresses: Sequence[str], members: Sequence[int], timeout_seconds: float = 0
) -> TcpTransport | None:
    """Connects `members`; returns None on the other ranks. A collective of all ranks.

    Args:
        store: The store of all ranks.
        addresses: `host:port` of each rank. Each rank listens on the network by which it reaches these.
        members: The ranks to connect, in their order in the transport.
        timeout_seconds: Limit of a wait for another rank, and of a broken connection; 0 means no limit.

    Raises:
        NoTransportError: The ranks cannot reach each other; the message says why and is equal on all ranks.
    """
    if store.rank not in members:
        return None
    rank = members.index(store.rank)
    door = None
    reason = ""
    try:
        door = Door(tcp_door.own_address(rank, [addresses[member] for member in members]))
    except (OSError, ConfigError) as e:
        reason = f"rank {rank} cannot listen: {describe_error(e)}"
    store.put(f"door/{rank}", door.address if door else "")
    if rank == 0:
        store.put("token", secrets.token_hex(tcp_door.TOKEN_BYTES))
    token = bytes.fromhex(store.get("token"))
    doors = [store.get(f"door/{peer}") for peer in range(len(members))]
    streams = {}
    if door is not None:
        door.open(token)
        for peer in range(rank):
            try:
                streams[peer] = tcp_door.call(doors[peer], Hello(tcp_door.JOIN, rank), token, _REACH_SECONDS)
            except (OSError, ValueError) as e:  # ValueError: it has no door
                reason = reason or f"rank {rank} cannot reach rank {peer} at {doors[peer]}: {describe_error(e)}"
    store.put(f"joined/{rank}", reason)
    reasons = [store.get(f"joined/{peer}") for peer in range(len(members))]
    reason = next(filter(None, reasons), "")
    if reason or door is None:
        for connection in streams.values():
            connection.close()
        if door is not None:
            door.close()
        raise NoTransportError(reason)
    # All have connected, and their hellos are on the way.
    while len(streams) < len(members) - 1:
        for hello, connection in door.wait(store.seconds):
            streams[hello.rank] = connection
    return TcpTransport(rank, Streams(rank, streams, timeout_seconds, door, doors, token, _LAST))


class TcpTransport(BufferTransport):
    """A transport over a stream to each other rank.

    After an error all further calls raise ConnectionError: the ranks are no longer at the same point.

    Attributes:
        streams: The streams, by rank in `streams.of`.
    """

    checks_calls = True

    def __init__(self, rank: int, streams: Streams):
        self.rank = rank
        self.size = len(streams.of) + 1
        self.streams = streams
        self._others = sorted(streams.of)
        self._calls = 0
        self._rows: dict[int, np.ndarray] = {}  # what ranks send to be added; memory that the next sum uses again
        self._lock = threading.Lock()

    def all_reduce(self, array: np.ndarray, largest: bool = False) -> np.ndarray:
        flat = np.ascontiguousarray(array).reshape(-1)
        total = aligned_empty(flat.size, flat.dtype)
        method = "all_reduce of the largest" if largest else "all_reduce"
        if flat.nbytes <= SMALL_BYTES:
            every = np.empty((self.size, flat.size), flat.dtype)
            self._gather(method, array, every)
            reduce_in_order(every, total, largest)
        else:
            with self._call(method, array):
                self._reduce(flat, total, largest)
        return total.reshape(array.shape)

    def _reduce(self, flat: np.ndarray, total: np.ndarray, largest: bool) -> None:
        parts = [slice(r * flat.size // self.size, (r + 1) * flat.size // self.size) for r in range(self.size)]

        def send(piece: np.ndarray) -> None:
            for peer in self._others:
                self.streams.of[peer].send(_bytes(piece))

        self._expect_sum([flat[part] for part in parts], total[parts[self.rank]], largest, send)
        for peer in self._others:
            self.streams.of[peer].expect(_bytes(total[parts[peer]]))
        self.streams.run()

    def _expect_sum(
        self, rows: Sequence[np.ndarray], total: np.ndarray, largest: bool, added: Callable[[np.ndarray], None]
    ) -> None:
        """Sends each other rank its row, and writes the sum of all ranks' rows for this rank to `total`.

        Calls `added` with each piece of the sum as soon as it is there.
        """
        local = rows[self.rank]
        received = self._rows_of(local)
        # The sum takes the place of what the first of the others has sent, which needs no memory beside the result.
        received[self._others[0]] = total
        received[self.rank] = local
        step = _PIECE_BYTES // local.itemsize
        pieces = [slice(start, start + step) for start in range(0, len(local), step)]
        missing = [len(self._others)] * len(pieces)

        def arrived(number: int) -> None:
            missing[number] -= 1
            if missing[number]:
                return
            piece = total[pieces[number]]
            reduce_in_order([row[pieces[number]] for row in received], piece, largest)
            added(piece)

        for peer in self._others:
            stream = self.streams.of[peer]
            stream.send(_bytes(rows[peer]))
            for number, piece in enumerate(pieces):
                stream.expect(_bytes(received[peer][piece]), functools.partial(arrived, number))

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        check_rows(array, self.size)
        rows = np.ascontiguousarray(array).reshape(self.size, -1)
        total = aligned_empty(rows.shape[1], rows.dtype)
        with self._call("reduce_scatter", array):
            self._expect_sum(list(rows), total, False, lambda piece: None)
            self.streams.run()
        return total.reshape(array.shape[1:])

    def _rows_of(self, like: np.ndarray) -> list[np.ndarray]:
        """Returns a vector of each rank to receive into; the memory is used again, as new memory costs a page fault each 4 kB."""
        rows = []
        for rank in range(self.size):
            if rank in (self.rank, self._others[0]):
                rows.append(like)
                continue
            memory = self._rows.get(rank)
            if memory is None or memory.nbytes < like.nbytes:
                memory = self._rows[rank] = np.empty(like.nbytes, np.uint8)
            rows.append(memory[: like.nbytes].view(like.dtype))
        return rows

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        every = aligned_empty(self.size * array.size, array.dtype).reshape(self.size, *array.shape)
        self._gather("all_gather", array, every)
        return every

    def _gather(self, method: str, array: np.ndarray, every: np.ndarray) -> None:
        """Fills `every`, `[size, ...]`, with the arrays of all ranks."""
        local = np.ascontiguousarray(array)
        every.reshape(self.size, -1)[self.rank] = local.reshape(-1)
        with self._call(method, array):
            for peer in self._others:
                self.streams.of[peer].send(_bytes(local))
                self.streams.of[peer].expect(_bytes(every[peer, ...]))
            self.streams.run()

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        check_rows(array, self.size)
        local = np.ascontiguousarray(array)
        rows = aligned_empty(array.size, array.dtype).reshape(array.shape)
        rows[self.rank] = array[self.rank]
        with self._call("all_to_all", array):
            for peer in self._others:
                self.streams.of[peer].send(_bytes(local[peer, ...]))
                self.streams.of[peer].expect(_bytes(rows[peer, ...]))
            self.streams.run()
        return rows

    @contextlib.contextmanager
    def _call(self, method: str, array: np.ndarray) -> Iterator[None]:
        """Begins a call on each stream, and compares it with those of the other ranks as they arrive."""
        shape = zlib.crc32(f"{array.dtype.name} {array.shape}".encode())
        header = _HEADER.pack(self._calls, _METHODS.index(method), array.size, shape, 0)
        with self._lock:
            self.streams.check()
            try:
                for peer in self._others:
                    found = bytearray(_HEADER.size)
                    self.streams.of[peer].send(memoryview(header))
                    self.streams.of[peer].expect(memoryview(found), self._comparison(peer, header, found))
                yield
            except BaseException as e:  # Ctrl-C, too
                self.streams.abort(self.rank, f"an earlier call has failed: {e}")
                self.streams.release()
                raise
            self._calls = (self._calls + 1) % _NUMBERS

    def _comparison(self, peer: int, own: bytes, found: bytearray) -> Callable[[], None]:
        def compare() -> None:
            if found == own:
                return
            method, elements = _HEADER.unpack(found)[1:3]
            if _METHODS[method] == "end":
                raise ConnectionError(f"rank {peer} has ended")
            own_method, own_elements = _HEADER.unpack(own)[1:3]
            raise RuntimeError(
                f"rank {peer} called another collective than rank {self.rank}: {_METHODS[method]} of {elements} elements, "
                f"and not {_METHODS[own_method]} of {own_elements}, or one of another type or shape"
            )

        return compare

    def close(self) -> None:
        self.streams.shut()
        # The lock is held during a call: of another thread, or of this one, interrupted by a signal.
        if self._lock.acquire(blocking=False):
            self.streams.release()
            self._lock.release()


def _bytes(vector: np.ndarray) -> memoryview:
    return vector.reshape(-1).view(np.uint8).data
