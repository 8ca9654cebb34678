"""The elements of a value that each rank holds. Functions of shapes. No TensorFlow here.

An index is a tuple of slices: one for each dimension of the value, or a single one for a range of the flat value. The ranks hold each element
once, so that values that are split in one way can be joined, and split in another way or among another number of ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

Index = tuple[slice, ...]

CHUNK_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Split:
    """The elements of a value that each rank holds.

    Attributes:
        shape: The shape of the whole value.
        indices: The index of each rank's piece, in which each slice has a start, a stop and a step; None if another rank stores the same piece.
    """

    shape: tuple[int, ...]
    indices: tuple[Index | None, ...]

    def size(self, rank: int) -> int:
        """Returns the number of elements that a rank stores."""
        index = self.indices[rank]
        return 0 if index is None else math.prod(shape_of(index))

    def chunks(self, itemsize: int) -> Iterator[range]:
        """Yields the rows of the value in ranges of at most 64 MB, or of one row. A value without dimensions has one row."""
        rows, *columns = self.shape or (1,)
        step = max(1, CHUNK_BYTES // max(1, math.prod(columns) * itemsize))
        for begin in range(0, rows, step):
            yield range(begin, min(begin + step, rows))

    def overlap(self, rank: int, rows: range) -> tuple[Index, slice] | None:
        """Returns the elements of a chunk that a rank stores: their index in the chunk and their slice of the piece; None if there are none."""
        index = self.indices[rank]
        if index is None:
            return None
        first, *others = index
        # A range of the flat value is a range of the flat chunk.
        width = math.prod(self.shape[1:]) if len(index) == 1 else 1
        begin, step = rows.start * width, first.step
        start = max(0, -((first.start - begin) // step))
        stop = min(len(range(first.start, first.stop, step)), -((first.start - rows.stop * width) // step))
        if start >= stop or not self.size(rank):
            return None
        offset = first.start - begin
        return (slice(offset + start * step, offset + (stop - 1) * step + 1, step), *others), slice(start, stop)


def shape_of(index: Index) -> tuple[int, ...]:
    """Returns the shape of the piece with an index."""
    return tuple(len(range(part.start, part.stop, part.step)) for part in index)


def view(whole: np.ndarray, index: Index) -> np.ndarray:
    """Returns the elements of a contiguous array with an index, in the array's memory."""
    return (whole.reshape(-1) if len(index) == 1 else whole)[index]


def split_rows(shape: tuple[int, ...], ranks: int) -> Split:
    """Returns a split by rows: row `i` is row `i // ranks` of the rank `i % ranks`."""
    rows, *columns = shape
    whole = [slice(0, size, 1) for size in columns]
    return Split(shape, tuple((slice(rank, rows, ranks), *whole) for rank in range(ranks)))


def split_bucket(shapes: Sequence[tuple[int, ...]], ranks: int, alignment: int = 1) -> list[Split]:
    """Returns the split of each value of a bucket by ranges of the flat values.

    A bucket holds values one after the other. Each rank holds one part of it, of about equal length: a value is cut only at multiples of
    `alignment` elements. The ranges of one value are in the order of the ranks, and some are empty.
    """
    sizes = list(map(math.prod, shapes))
    part = -(-sum(sizes) // ranks)
    splits = []
    start = 0
    for shape, size in zip(shapes, sizes, strict=True):
        cuts = [min(-(-max(rank * part - start, 0) // alignment) * alignment, size) for rank in range(ranks)]
        splits.append(Split(shape, tuple((slice(begin, end, 1),) for begin, end in itertools.pairwise([*cuts, size]))))
        start += size
    return splits
