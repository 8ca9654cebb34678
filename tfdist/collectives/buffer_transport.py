"""What sums and moves NumPy arrays among the processes of a strategy, in place of TensorFlow's collectives. No TensorFlow here."""

from __future__ import annotations

import abc

import numpy as np

_ALIGNMENT = 64  # bytes


def aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """Returns a new array of a dimension at an address from where TensorFlow takes it without a copy."""
    memory = np.empty(size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size * dtype.itemsize].view(dtype)


def check_rows(array: np.ndarray, size: int) -> None:
    """Raises ValueError unless an array has a row for each of `size` ranks."""
    if not array.ndim or array.shape[0] != size:
        raise ValueError(f"array has the shape {array.shape}, expected a row for each of the {size} ranks.")


class NoTransportError(RuntimeError):
    """The ranks cannot be connected; the message says why."""


class BufferTransport(abc.ABC):
    """Sums NumPy arrays among the ranks.

    All ranks call the same methods in the same order, one call at a time.

    Attributes:
        rank: This process's number.
        size: The number of ranks.
    """

    rank: int
    size: int

    @abc.abstractmethod
    def all_reduce(self, array: np.ndarray, largest: bool = False) -> np.ndarray:
        """Returns the sum of an array over all ranks, with equal bits on all ranks.

        Args:
            array: Of any shape and any type of numbers, bfloat16 and float16 among them.
            largest: Whether to compute the maximum instead.
        """

    @abc.abstractmethod
    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Returns the arrays of all ranks, `[size, *shape]`; they have the same shape on all ranks."""

    @abc.abstractmethod
    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        """Sends row i of an array `[size, ...]` to rank i. Returns the rows that are for this rank, in the order of their ranks."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the transport. All ranks call it, or end without."""
