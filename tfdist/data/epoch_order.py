"""The order of the examples of an epoch: a pure function of the seed and the epoch, whose memory does not grow with the data."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

WINDOW = 1 << 18  # examples that are shuffled among each other


class EpochOrder:
    """The order in which each epoch visits the rows of blocks.

    An epoch permutes the blocks, and then the rows of each window of successive blocks. A source that can only read blocks
    needs those of one window at a time. Data of up to `window` rows are one window: each order of the rows can occur.

    Args:
        sizes: The number of rows in each block.
        seed: The seed of the shuffling.
        shuffle: Whether to shuffle; else each epoch has the order of the blocks and rows.
        window: The least number of rows in a window, if there are as many. A window ends with a block.

    Attributes:
        num_examples: The number of rows in all blocks.
    """

    def __init__(self, sizes: Sequence[int] | np.ndarray, seed: int, shuffle: bool, window: int = WINDOW):
        self._sizes = np.asarray(sizes, np.int64)
        self._seed = seed
        self._shuffle = shuffle
        self._window = window
        self.num_examples = int(self._sizes.sum())
        # Parallel reads are close to each other: they need the blocks of two epochs and the rows of a few windows.
        self._blocks = functools.lru_cache(2)(self._permute_blocks)
        self._rows = functools.lru_cache(4)(self._permute_rows)

    def examples(self, epoch: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the block and the row in its block of each example from position `begin` to `end` (exclusive) of an epoch."""
        blocks, starts = self._blocks(epoch if self._shuffle else 0)
        if not self._shuffle:
            return _locate(np.arange(begin, end), blocks, starts)
        parts = []
        while begin < end:
            window = int(starts[np.searchsorted(starts, begin, "right") - 1]) // self._window
            first, *located = self._rows(epoch, window)
            parts.append([values[begin - first : end - first] for values in located])
            begin += len(parts[-1][0])
        if len(parts) == 1:
            return parts[0][0], parts[0][1]
        empty = [np.zeros(0, np.int64)]
        return np.concatenate(empty + [part[0] for part in parts]), np.concatenate(empty + [part[1] for part in parts])

    def _permute_blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks with rows in the order of an epoch, and the position of the first row of each."""
        blocks = np.flatnonzero(self._sizes)
        if self._shuffle:
            blocks = blocks[permutation(len(blocks), f"{self._seed}/{epoch}")]
        ends = np.cumsum(self._sizes[blocks])
        return blocks, ends - self._sizes[blocks]

    def _permute_rows(self, epoch: int, window: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Returns the position of the first row of a window, and the block and the row in its block of each of the window's examples."""
        blocks, starts = self._blocks(epoch)
        first, last = np.searchsorted(starts, [window * self._window, (window + 1) * self._window])
        begin = int(starts[first])
        end = self.num_examples
        if last < len(starts):
            end = int(starts[last])
        rows = permutation(end - begin, f"{self._seed}/{epoch}/{window}")
        return begin, *_locate(begin + rows, blocks, starts)


def _locate(positions: np.ndarray, blocks: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the block and the row in its block of positions in an epoch without the permutation of rows."""
    indices = np.searchsorted(starts, positions, "right") - 1
    return blocks[indices], positions - starts[indices]


def permutation(size: int, key: str) -> np.ndarray:
    """Returns a permutation that depends on the key alone, unlike those of NumPy's generators, which NumPy may change."""
    start = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    # splitmix64 (Steele et al., 2014): hashes of successive numbers
    bits = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(bits ^ (bits >> np.uint64(31)), kind="stable")
