"""Sums and moves made of one step: each rank sends an array to each other rank, and receives one from each. No TensorFlow here.

An array is cut into a part for each rank. Each rank gets the others' parts that are its own and adds them up in the order of the ranks;
then it sends that sum to all. So every byte crosses the network twice, whatever the number of ranks, and all ranks have the same bits.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from tfdist.collectives.buffer_transport import BufferTransport, aligned_empty
from tfdist.collectives.fold import fold

_SMALL = 2**15  # bytes up to which every rank adds up the whole array: one exchange instead of two


class ExchangedTransport(BufferTransport):
    """A transport whose library sends and receives bytes."""

    @abc.abstractmethod
    def _exchange(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Sends an array to each other rank, and receives one from each, all at once.

        Args:
            sent: An array for each rank, contiguous and of bytes, `[bytes]`; this rank's own is not used.
            received: Where to write those of the others, likewise.
        """

    def all_reduce(self, array: np.ndarray, largest: bool = False) -> np.ndarray:
        flat = np.ascontiguousarray(array).reshape(-1)
        total = aligned_empty(flat.size, flat.dtype)
        if flat.nbytes <= _SMALL:
            fold(self.all_gather(flat), total, largest)
            return total.reshape(array.shape)
        parts = [slice(r * flat.size // self.size, (r + 1) * flat.size // self.size) for r in range(self.size)]
        mine = flat[parts[self.rank]]
        rows = [mine if r == self.rank else np.empty_like(mine) for r in range(self.size)]
        self._move([flat[part] for part in parts], rows)
        fold(rows, total[parts[self.rank]], largest)
        self._move([total[parts[self.rank]]] * self.size, [total[part] for part in parts])
        return total.reshape(array.shape)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        mine, every = np.ascontiguousarray(array), np.empty((self.size, *array.shape), array.dtype)
        every[self.rank] = array
        self._move([mine] * self.size, [every[r, ...] for r in range(self.size)])
        return every

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        mine, rows = np.ascontiguousarray(array), np.empty(array.shape, array.dtype)
        rows[self.rank] = array[self.rank]
        self._move([mine[r, ...] for r in range(self.size)], [rows[r, ...] for r in range(self.size)])
        return rows

    def _move(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        self._exchange(*([array.reshape(-1).view(np.uint8) for array in arrays] for arrays in (sent, received)))
