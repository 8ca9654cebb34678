"""The elements of a value that each rank of a group holds. Functions of shapes and of the number of ranks. No TensorFlow here.

A rank holds a range of a flat value. So a piece means the same elements for any number of ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Range:
    """The elements of a flat value from `begin` on."""

    begin: int
    length: int

    @property
    def end(self) -> int:
        """The element after the last one."""
        return self.begin + self.length


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The elements that each rank holds of a value: each element is in the range of exactly one rank.

    Attributes:
        elements: The number of elements of the value.
        ranges: The range of each rank.
    """

    elements: int
    ranges: tuple[Range, ...]


def contiguous(elements: int, ranks: int) -> Pieces:
    """Returns one range per rank, in the order of the ranks. All but the last ones have equal lengths; those may be shorter or empty."""
    part = -(-elements // ranks)
    bounds = [min(rank * part, elements) for rank in range(ranks + 1)]
    return Pieces(elements, tuple(Range(begin, end - begin) for begin, end in itertools.pairwise(bounds)))


def of_bucket(sizes: Sequence[int], ranks: int, alignment: int = 1) -> list[Pieces]:
    """Returns the pieces of each value of a bucket, in the value's own coordinates.

    A bucket holds values of `sizes` elements one after the other. Each rank holds one part of it, of about equal length: a value is cut
    only at multiples of `alignment` elements.
    """
    parts = contiguous(sum(sizes), ranks).ranges
    pieces = []
    start = 0
    for size in sizes:
        cuts = [min(-(-max(part.begin - start, 0) // alignment) * alignment, size) for part in parts]
        bounds = itertools.pairwise([*cuts, size])
        pieces.append(Pieces(size, tuple(Range(begin, end - begin) for begin, end in bounds)))
        start += size
    return pieces
