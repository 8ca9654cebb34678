"""Values in a backup that are split: over ranks, or over the shards of a table. A reader joins them, so that any number of ranks or shards reads them.

The shared part holds the shape of a split value. The pieces are in the parts of the ranks that store them, or in the shared part if one
process has all of them. A piece's key has its index (`sharding/split.py`), `start:stop:step` for each dimension: `piece-1:9:2,0:4:1/name`. An
index of one slice is a range of the flat value.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.backup.files import CorruptBackupError
from tfdist.sharding.split import CHUNK_BYTES, Index, shape_of, view

_SHAPE = "shape-of-split/"
_PIECE = re.compile(r"piece-([\d:,]+)/(.*)", re.DOTALL)
_SLICE = re.compile(r"(\d+):(\d+):([1-9]\d*)")


class ServerError(Exception):
    """A server's rows could not be read, because of the error that is the cause."""


@dataclasses.dataclass
class ServerRows:
    """The rows of a shard on a server. They are read while they are written, in chunks, so that no other process holds the shard.

    Attributes:
        variable: The shard.
        shape: The shape of its rows.
    """

    variable: tf.Variable
    shape: tuple[int, ...]

    def chunks(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Yields each chunk's first row, and its rows: at most 64 MB. Raises ServerError."""
        rows, *columns = self.shape
        step = max(1, CHUNK_BYTES // (math.prod(columns) * self.variable.dtype.size))
        for begin in range(0, rows, step):
            try:
                yield begin, tf.identity(tf.gather(self.variable, tf.range(begin, min(begin + step, rows))))
            except tf.errors.OpError as e:
                raise ServerError from e


def shape_key(name: str) -> str:
    """Returns the key of a split value's shape in the shared part."""
    return f"{_SHAPE}{name}"


def piece_key(index: Index, name: str) -> str:
    """Returns the key of the piece of a value with an index."""
    slices = ",".join(f"{part.start}:{part.stop}:{part.step}" for part in index)
    return f"piece-{slices}/{name}"


def without_pieces(own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rank's part without its pieces of split values."""
    return {key: value for key, value in own.items() if not _PIECE.fullmatch(key)}


@dataclasses.dataclass(frozen=True)
class _Piece:
    index: Index
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the piece has the shape of its index, and lies within a value of `shape`."""
        sizes = (math.prod(shape),) if len(self.index) == 1 else shape
        if len(self.index) != len(sizes) or self.shape != shape_of(self.index):
            return False
        return all(part.stop <= size for part, size in zip(self.index, sizes, strict=True))


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """A value that a backup holds in pieces, which are read when NumPy makes an array of it, so that memory holds one such value at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Sequence[_Piece]

    @property
    def held(self) -> int:
        """The number of elements of all pieces."""
        return sum(math.prod(piece.shape) for piece in self.pieces)

    def is_whole(self) -> bool:
        """Returns whether each element is in one piece."""
        if self.held != math.prod(self.shape) or not all(piece.fits(self.shape) for piece in self.pieces):
            return False
        is_held = np.zeros(self.shape, bool)
        for piece in self.pieces:
            view(is_held, piece.index)[...] = True
        return bool(is_held.all())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.empty(self.shape, self.dtype)
        for piece in self.pieces:
            view(whole, piece.index)[...] = piece.read()
        return np.asarray(whole, dtype)


def join(
    parts: Iterable[tuple[str, Mapping[str, np.ndarray]]],
    path: str,
    read: Callable[[str, str], np.ndarray] | None = None,
) -> dict[str, Any]:
    """Returns the shared part with whole values in place of their shapes and pieces.

    Args:
        parts: The names and tensors of the shared part and those of all ranks, which are read only if the shared part lacks elements.
        path: The path of the backup, for messages.
        read: Reads a tensor again, by the name of its part and its key, once the value is needed; None keeps the tensors.

    Raises:
        CorruptBackupError: An element of a value is in no piece, or in several.
    """
    parts = iter(parts)
    first, shared = next(parts)
    shapes = {
        key.removeprefix(_SHAPE): tuple(value.tolist()) for key, value in shared.items() if key.startswith(_SHAPE)
    }
    joined = without_pieces({key: value for key, value in shared.items() if not key.startswith(_SHAPE)})
    stored = {name: StoredValue(shape, np.dtype(bool), []) for name, shape in shapes.items()}

    def add(part: str, tensors: Mapping[str, np.ndarray]) -> None:
        for key, value in tensors.items():
            match = _PIECE.fullmatch(key)
            if match and match[2] in stored:
                again = functools.partial(read, part, key) if read else functools.partial(np.asarray, value)
                found = stored[match[2]]
                pieces = [*found.pieces, _Piece(_index(match[1]), value.shape, again)]
                stored[match[2]] = dataclasses.replace(found, dtype=value.dtype, pieces=pieces)

    add(first, shared)
    if any(value.held < math.prod(value.shape) for value in stored.values()):
        for part, tensors in parts:
            add(part, tensors)
    for name, value in stored.items():
        if not value.is_whole():
            raise CorruptBackupError(f"{path} does not hold {name!r} once")
    return joined | stored


def _index(text: str) -> Index:
    """Returns the index in a key; empty unless the text is one."""
    slices = [_SLICE.fullmatch(part) for part in text.split(",")]
    return tuple(slice(*map(int, match.groups())) for match in slices if match) if all(slices) else ()
