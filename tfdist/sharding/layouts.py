"""Layouts of values over a mesh of ranks: which part of a value each rank holds. Functions of shapes. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import math

from tfdist.sharding.split import Index, Split


@dataclasses.dataclass(frozen=True)
class Grid:
    """The ranks of a mesh, of which the last axis varies fastest.

    Attributes:
        axes: The names of the axes.
        sizes: The number of ranks along each axis.
        batch: The name of the axis along which the batch is split. Ranks that differ in the others only have the same examples.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    batch: str

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Returns a rank's position along each axis."""
        position = []
        for size in reversed(self.sizes):
            position.append(rank % size)
            rank //= size
        return tuple(reversed(position))

    def data_group(self, rank: int) -> list[int]:
        """Returns the ranks that hold the same pieces as `rank`: they differ in the batch axis only."""
        return [other for other in range(self.ranks) if self._apart(other) == self._apart(rank)]

    def model_group(self, rank: int) -> list[int]:
        """Returns the ranks that have the same examples as `rank`: together they hold all pieces."""
        index = self.axes.index(self.batch)
        own = self.coordinates(rank)[index]
        return [other for other in range(self.ranks) if self.coordinates(other)[index] == own]

    def _apart(self, rank: int) -> tuple[int, ...]:
        index = self.axes.index(self.batch)
        coordinates = self.coordinates(rank)
        return coordinates[:index] + coordinates[index + 1 :]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a value: the axis of the mesh along which each dimension is split, or None.

    Attributes:
        shape: The shape of the whole value.
        axes: An axis or None for each dimension.
        grid: The ranks.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    grid: Grid

    def fault(self) -> str:
        """Returns why the value cannot have this layout; empty if it can."""
        if len(self.axes) != len(self.shape):
            return f"has {len(self.axes)} dimensions, and the variable has shape {self.shape}"
        used = [axis for axis in self.axes if axis is not None]
        unknown = [axis for axis in used if axis not in self.grid.axes]
        if unknown:
            return f"names {unknown[0]!r}, which is not an axis of the mesh"
        if len(used) > len(set(used)):
            return "names an axis twice"
        if self.grid.batch in used:
            return f"names {self.grid.batch!r}, the axis of the batch, which is not possible (yet): name another axis of the mesh"
        for size, axis in zip(self.shape, self.axes, strict=True):
            if size % self._parts(axis):
                return f"splits a dimension of size {size} into {self._parts(axis)} parts along {axis!r}, which do not divide it"
        return ""

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of each rank's piece."""
        return tuple(size // self._parts(axis) for size, axis in zip(self.shape, self.axes, strict=True))

    @property
    def split(self) -> Split:
        """The elements that each rank stores: of the ranks with the same piece, the first one."""
        ranks = range(self.grid.ranks)
        return Split(self.shape, tuple(self.slices(rank) if self._is_first(rank) else None for rank in ranks))

    def slices(self, rank: int) -> Index:
        """Returns the part of the value that a rank holds."""
        coordinates = dict(zip(self.grid.axes, self.grid.coordinates(rank), strict=True))
        parts = []
        for axis, length in zip(self.axes, self.piece_shape, strict=True):
            begin = coordinates[axis] * length if axis else 0
            parts.append(slice(begin, begin + length, 1))
        return tuple(parts)

    def _is_first(self, rank: int) -> bool:
        coordinates = zip(self.grid.axes, self.grid.coordinates(rank), strict=True)
        return all(axis in self.axes or position == 0 for axis, position in coordinates)

    def joining(self) -> tuple[list[int], tuple[slice | int, ...], list[int]]:
        """Returns how the pieces of a model group become the whole value: (shape of the mesh, index, order of the axes).

        The pieces, one after the other in the order of the group's ranks, are reshaped to the shape of the mesh and that of a piece.
        The index chooses one of equal pieces. The order then puts each axis of the mesh before the dimension that it splits.
        """
        others = [axis for axis in self.grid.axes if axis != self.grid.batch]
        sizes = [self._parts(axis) for axis in others]
        index = tuple(slice(None) if axis in self.axes else 0 for axis in others)
        used = [axis for axis in others if axis in self.axes]
        order = []
        for dimension, axis in enumerate(self.axes):
            if axis is not None:
                order.append(used.index(axis))
            order.append(len(used) + dimension)
        return sizes, index, order

    def _parts(self, axis: str | None) -> int:
        return 1 if axis is None else self.grid.sizes[self.grid.axes.index(axis)]
