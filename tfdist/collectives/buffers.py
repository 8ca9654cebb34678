"""`BufferTransport`: what sums NumPy arrays among processes without TensorFlow's collectives. No TensorFlow here."""

from __future__ import annotations

import abc

import numpy as np


class BufferTransport(abc.ABC):
    """Sums NumPy arrays among the ranks. All ranks call the same methods in the same order, one call at a time.

    Attributes:
        rank: This process's number.
        size: The number of processes.
    """

    rank: int
    size: int

    @abc.abstractmethod
    def all_reduce(self, array: np.ndarray, largest: bool = False) -> None:
        """Puts the sums over all ranks into an array, the same to the bit on all of them.

        Args:
            array: Contiguous, of any shape and any type of numbers, bfloat16 and float16 among them.
            largest: Whether the largest are wanted instead.
        """

    @abc.abstractmethod
    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Returns `[size, *shape]`, the arrays of all ranks, which have the same shape."""

    @abc.abstractmethod
    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        """Gives row i of `[size, ...]` to rank i; returns the rows of all ranks for this one."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends it. All ranks call it, or end without."""
