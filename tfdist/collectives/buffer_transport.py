"""Transports that sum and move NumPy arrays among processes, instead of TensorFlow's collectives. Does not import TensorFlow."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.collectives.tree import fold

_ALIGNMENT = 64  # bytes
_CACHED = 2**15  # elements of temporary sums, so that they stay in a core's cache
_HALVES = ("float16", "bfloat16")
# Up to this size every rank sums the entire array, so that the ranks wait for each other once instead of twice.
SMALL_BYTES = 2**15


class BufferTransport(abc.ABC):
    """A connection of all ranks that sums and moves NumPy arrays.

    All ranks call the same methods in the same order, one call at a time.

    Attributes:
        rank: This process's rank.
        size: The number of ranks.
        checks_calls: Whether a call raises if another rank makes another one, instead of waiting forever.
    """

    rank: int
    size: int
    checks_calls = False

    @abc.abstractmethod
    def all_reduce(self, array: np.ndarray, largest: bool = False) -> np.ndarray:
        """Returns the sum of an array over all ranks, with equal bits on all ranks.

        Args:
            array: Has any shape and any numeric dtype, including bfloat16 and float16.
            largest: Whether to compute the maximum instead.
        """

    @abc.abstractmethod
    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Returns the arrays of all ranks, stacked to `[size, *shape]`. All ranks pass the same shape."""

    @abc.abstractmethod
    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        """Sends row i of an array `[size, ...]` to rank i. Returns the rows that this rank receives, ordered by sender."""

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        """Returns row `rank` of the sum of an array `[size, ...]` over all ranks, with the bits that `all_reduce` gives it."""
        rows = self.all_to_all(array).reshape(self.size, -1)
        total = aligned_empty(rows.shape[1], rows.dtype)
        reduce_in_order(rows, total, largest=False)
        return total.reshape(array.shape[1:])

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the transport. All ranks must call it; if a rank exits without it, the others may wait."""


class NoTransportError(RuntimeError):
    """The ranks cannot be connected; the message says why."""


@dataclasses.dataclass(frozen=True)
class Store:
    """A key-value store through which ranks exchange texts before they have a transport.

    Attributes:
        rank: This process's rank.
        size: The number of ranks.
        write: Publishes a text to all ranks: `write(key, text)`.
        read: Returns the text of a key: `read(key, seconds)`. Raises if the key is not published in time.
        name: Prefix of the keys, unique to each connection.
        seconds: The limit of each wait.
    """

    rank: int
    size: int
    write: Callable[[str, str], None]
    read: Callable[[str, float], str]
    name: str
    seconds: float = 60.0

    def put(self, key: str, text: str) -> None:
        """Publishes a text to all ranks."""
        self.write(f"{self.name}/{key}", text)

    def get(self, key: str, seconds: float | None = None) -> str:
        """Returns the text of a key; raises if it is not published within `seconds`."""
        return self.read(f"{self.name}/{key}", self.seconds if seconds is None else seconds)

    def part(self, name: str, ranks: Sequence[int] | None = None) -> Store:
        """Returns a store with a longer key prefix, for `ranks` (which include this rank) or by default for all ranks."""
        store = dataclasses.replace(self, name=f"{self.name}/{name}")
        if ranks is None:
            return store
        return dataclasses.replace(store, rank=ranks.index(self.rank), size=len(ranks))


def reduce_in_order(values: Sequence[np.ndarray] | np.ndarray, out: np.ndarray, largest: bool) -> None:
    """Computes the sum (or maximum) of arrays in the order of `tree`, so that every rank computes the same bits.

    float16 and bfloat16 are added as float32, and each sum is rounded, as TensorFlow does. `values` are vectors of the same length;
    `out`, which receives the result, must not be one of them.
    """
    join = np.maximum if largest else np.add
    with np.errstate(all="ignore"):  # sums may be infinite or NaN, as TensorFlow's may be; callers check them
        if len(values) == 2 and out.dtype.name not in _HALVES:
            join(values[0], values[1], out=out)
            return
        for start in range(0, out.size, _CACHED):  # temporary sums stay in a core's cache
            out[start : start + _CACHED] = fold([value[start : start + _CACHED] for value in values], _joined(join))


def _joined(join: np.ufunc) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def joined(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if left.dtype.name not in _HALVES:
            return join(left, right)
        return join(left.astype(np.float32), right.astype(np.float32)).astype(left.dtype)

    return joined


def aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """Returns a new vector at an aligned address, so that TensorFlow uses it without a copy."""
    memory = np.empty(size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size * dtype.itemsize].view(dtype)


def check_rows(array: np.ndarray, size: int) -> None:
    """Raises ValueError unless an array has a row for each of `size` ranks."""
    if not array.ndim or array.shape[0] != size:
        raise ValueError(f"array has the shape {array.shape}, expected a row for each of the {size} ranks.")
