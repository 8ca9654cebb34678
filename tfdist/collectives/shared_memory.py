"""A transport through shared memory among processes of one host. Does not import TensorFlow.

An array is sent in pieces. Each rank writes the parts of a piece that other ranks need into its slot of the memory. Then each rank sums
its part of the piece over all ranks, in rank order, and the others read that sum. So all ranks have the same bits, whatever their timing.
Each rank has three slots, used in turn, so that it can write a piece while others still read earlier pieces.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from tfdist.collectives import shared_memory_rendezvous
from tfdist.collectives.buffer_transport import (
    SMALL_BYTES,
    BufferTransport,
    Store,
    aligned_empty,
    check_rows,
    reduce_in_order,
)
from tfdist.collectives.peer_links import PeerLinks

# Maximum size. Smaller slots mean more waits, which cost most when other processes use the processors.
SLOT_BYTES = 2**23
_TURNS = 3
_MOST_BYTES = 3 * 2**26  # default maximum of all slots together
_LINE = 64  # bytes of a cache line, the unit that processors exchange


def connect(store: Store, timeout_seconds: float = 0, slot_bytes: int = 0) -> SharedMemoryTransport:
    """Connects all ranks of a host. All ranks call it; either all return or all raise.

    Args:
        store: The store of the ranks.
        timeout_seconds: Limit of each wait for another rank in a call; 0 means no limit.
        slot_bytes: The size of a slot, at least 64 for each rank; rank 0's value is used. The memory has 3 * size slots.
            0 means 8 MB, or less with more than 8 ranks, so that the memory has at most 192 MB.

    Raises:
        NoTransportError: The ranks cannot share memory; the message says why and is equal on all ranks.
    """
    rank, size = store.rank, store.size
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}, expected one of 0 to {size - 1}.")
    slot_bytes = slot_bytes or min(SLOT_BYTES, _MOST_BYTES // (_TURNS * size))
    if slot_bytes < size * _LINE:
        raise ValueError(f"slot_bytes is {slot_bytes}, expected at least {size * _LINE}, {_LINE} for each rank.")
    slot_bytes -= slot_bytes % _LINE
    memory, sockets = shared_memory_rendezvous.meet(store, _TURNS * size * slot_bytes)
    return SharedMemoryTransport(memory, size, PeerLinks(rank, sockets, timeout_seconds), rank)


class SharedMemoryTransport(BufferTransport):
    """A transport among the ranks of one host.

    After an error all further calls raise ConnectionError: the ranks are no longer at the same point.
    """

    checks_calls = True

    def __init__(self, memory: mmap.mmap, size: int, links: PeerLinks, rank: int):
        self.rank = rank
        self.size = size
        self._slots = np.frombuffer(memory, np.uint8).reshape(_TURNS, size, -1)
        self._links = links
        self._others = [other for other in range(size) if other != rank]
        self._turn = 0
        self._lock = threading.Lock()

    def all_reduce(self, array: np.ndarray, largest: bool = False) -> np.ndarray:
        _check(array)
        flat = np.ascontiguousarray(array).reshape(-1)
        total = aligned_empty(flat.size, flat.dtype)
        with self._call("all_reduce", array, largest) as signature:
            reduce = self._reduce_small if flat.nbytes <= min(SMALL_BYTES, self._slots.shape[2]) else self._reduce
            reduce(flat, total, largest, signature)
        return total.reshape(array.shape)

    def _reduce_small(self, flat: np.ndarray, total: np.ndarray, largest: bool, signature: int) -> None:
        slots = self._next_slots(flat.dtype)[:, : flat.size]
        slots[self.rank] = flat
        self._links.post(signature)
        self._links.wait()
        reduce_in_order(slots, total, largest)

    def _reduce(self, flat: np.ndarray, result: np.ndarray, largest: bool, signature: int) -> None:
        step = self._slots.shape[2] // flat.itemsize
        starts = range(0, flat.size, step)
        pieces = [flat[start : start + step] for start in starts]
        results = [result[start : start + step] for start in starts]
        slots = self._put(pieces[0], signature)
        for index, piece in enumerate(pieces):
            self._links.wait()  # until all ranks have written this piece
            parts = self._parts(piece)
            own_part = parts[self.rank]
            # The sum goes into this rank's slot, where the others read it. Its own part of the slot is free: `_put` writes only the
            # parts that other ranks add up.
            total = slots[self.rank, own_part]
            values = [slots[r, own_part] for r in range(self.size)]
            values[self.rank] = piece[own_part]
            reduce_in_order(values, total, largest)
            self._links.post(signature)
            # Write the next piece while slower ranks still add up this one: it goes into the next slot, so these can be read.
            next_slots = slots
            if index + 1 < len(pieces):
                next_slots = self._put(pieces[index + 1], signature)
            results[index][own_part] = total
            self._links.wait()  # until all ranks have written their sums
            for other in self._others:
                results[index][parts[other]] = slots[other, parts[other]]
            slots = next_slots

    def _put(self, piece: np.ndarray, signature: int) -> np.ndarray:
        slots = self._next_slots(piece.dtype)
        parts = self._parts(piece)
        for other in self._others:
            slots[self.rank, parts[other]] = piece[parts[other]]
        self._links.post(signature)
        return slots

    def _parts(self, piece: np.ndarray) -> list[slice]:
        """Returns the part of a piece that each rank sums."""
        line = max(1, _LINE // piece.itemsize)
        length = -(-piece.size // (self.size * line)) * line
        return [slice(min(piece.size, r * length), min(piece.size, (r + 1) * length)) for r in range(self.size)]

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        _check(array)
        result = aligned_empty(self.size * array.size, array.dtype).reshape(self.size, *array.shape)
        result[self.rank] = array
        with self._call("all_gather", array) as signature:
            self._move(result.reshape(self.size, -1), signature, self._slots.shape[2], self._gather_piece)
        return result

    def _gather_piece(self, slots: np.ndarray, rows: np.ndarray) -> Callable[[], None]:
        slots[self.rank, : rows.shape[1]] = rows[self.rank]

        def read() -> None:
            for other in self._others:
                rows[other] = slots[other, : rows.shape[1]]

        return read

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        _check(array)
        check_rows(array, self.size)
        result = aligned_empty(array.size, array.dtype).reshape(array.shape)
        result[...] = array
        with self._call("all_to_all", array) as signature:
            width = self._slots.shape[2] // self.size
            self._move(result.reshape(self.size, -1), signature, width, self._exchange_piece)
        return result

    def _exchange_piece(self, slots: np.ndarray, rows: np.ndarray) -> Callable[[], None]:
        messages = self._put_messages(slots, rows)

        def read() -> None:
            for other in self._others:
                rows[other] = messages[other]

        return read

    def _put_messages(self, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Writes each other rank's row into this rank's slot. Returns the rows that each rank writes for this one."""
        width = slots.shape[1] // self.size
        messages = slots[:, : width * self.size].reshape(self.size, self.size, width)[:, :, : rows.shape[1]]
        for other in self._others:
            messages[self.rank, other] = rows[other]
        return messages[:, self.rank]

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        _check(array)
        check_rows(array, self.size)
        rows = np.ascontiguousarray(array).reshape(self.size, -1)
        total = aligned_empty(rows.shape[1], rows.dtype)
        remaining = total

        def add_piece(slots: np.ndarray, rows: np.ndarray) -> Callable[[], None]:
            nonlocal remaining
            messages = self._put_messages(slots, rows)
            piece = remaining[: rows.shape[1]]
            remaining = remaining[rows.shape[1] :]

            def add() -> None:
                values = list(messages)
                values[self.rank] = rows[self.rank]
                reduce_in_order(values, piece, largest=False)

            return add

        with self._call("reduce_scatter", array) as signature:
            self._move(rows, signature, self._slots.shape[2] // self.size, add_piece)
        return total.reshape(array.shape[1:])

    def broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        """Returns the array of `root` on all ranks; on `root` itself, without a copy. Others pass any array of its shape and dtype."""
        _check(array)
        if not 0 <= root < self.size:
            raise ValueError(f"root is {root}, expected one of 0 to {self.size - 1}.")
        sends = self.rank == root
        result = np.ascontiguousarray(array) if sends else aligned_empty(array.size, array.dtype)

        def write(slots: np.ndarray, rows: np.ndarray) -> Callable[[], None]:
            slot = slots[root, : rows.shape[1]]
            if not sends:
                return lambda: np.copyto(rows[0], slot)
            slot[...] = rows[0]
            return lambda: None

        with self._call(f"broadcast of {root}", array) as signature:
            self._move(result.reshape(1, -1), signature, self._slots.shape[2], write)
        return result.reshape(array.shape)

    def _move(
        self,
        rows: np.ndarray,
        signature: int,
        width: int,
        write: Callable[[np.ndarray, np.ndarray], Callable[[], None]],
    ) -> None:
        """Moves rows in pieces of `width` bytes: writes the rows that others need, waits for all ranks, and reads."""
        step = width // rows.itemsize
        for start in range(0, max(1, rows.shape[1]), step):
            read = write(self._next_slots(rows.dtype), rows[:, start : start + step])
            self._links.post(signature)
            self._links.wait()
            read()

    def close(self) -> None:
        self._links.shut()
        # The lock is held during a call: of another thread, or of this one, interrupted by a signal.
        if self._lock.acquire(blocking=False):
            self._release()
            self._lock.release()

    def _release(self) -> None:
        self._links.release()
        self._slots = np.empty((_TURNS, self.size, 0), np.uint8)

    @contextlib.contextmanager
    def _call(self, method: str, array: np.ndarray, largest: bool = False) -> Iterator[int]:
        with self._lock:
            self._links.check()
            try:
                yield zlib.crc32(f"{method} {largest} {array.dtype} {array.shape}".encode())
            except BaseException as e:  # Ctrl-C, too
                self._links.abort(self.rank, f"an earlier call has failed: {e}")
                self._release()
                raise

    def _next_slots(self, dtype: np.dtype) -> np.ndarray:
        """Returns the next slot of each rank, `[size, elements]`.

        No rank still reads from these slots: each rank had read them before it posted the last piece.
        """
        self._turn = (self._turn + 1) % _TURNS
        slots = self._slots[self._turn]
        return slots[:, : slots.shape[1] // dtype.itemsize * dtype.itemsize].view(dtype)


def _check(array: np.ndarray) -> None:
    if array.dtype.hasobject or not array.dtype.itemsize or array.dtype.itemsize > _LINE:
        raise TypeError(f"array has the type {array.dtype}, expected numbers.")
