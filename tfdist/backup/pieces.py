"""Values in a backup that are split over ranks, and tables that are split over variables. A reader joins them.

The shared part holds the shape of a split value. A rank's part holds its piece, under a name with the place of the first element: one
number in the flat value (slots, with `shard_optimizer`), or one for each dimension (variables and slots that a mesh of workers splits).
So any number of ranks reads the values, split or not. The shared part holds the rows of each shard of a table, so that a table
is read with any number of shards. If each worker holds a shard, its part has the rows, and the shared part the shape of the table.
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
from tfdist.layers.table import CHUNK_BYTES

_SHAPE = "shape-of-split/"
_ROWS = re.compile(r"rows-(\d+)-of-(\d+)/(.*)", re.DOTALL)
_PIECE = re.compile(r"piece-(\d+(?:,\d+)*)/(.*)", re.DOTALL)


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
    shape: list[int]

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


def piece_key(begin: Sequence[int], name: str) -> str:
    """Returns the key of the piece of a value that begins at an element of it, or, with one number, of the flat value."""
    return f"piece-{','.join(map(str, begin))}/{name}"


def rows_key(shard: int, shards: int, name: str) -> str:
    """Returns the key of the rows of a table that are in one of its shards."""
    return f"rows-{shard}-of-{shards}/{name}"


def join_tables(shared: Mapping[str, np.ndarray], path: str) -> dict[str, np.ndarray]:
    """Returns the shared part with whole tables in place of the rows of their shards. Raises CorruptBackupError if rows are missing."""
    joined: dict[str, np.ndarray] = {}
    tables: dict[tuple[str, int], dict[int, np.ndarray]] = {}
    for key, value in shared.items():
        match = _ROWS.fullmatch(key)
        if match is None:
            joined[key] = value
        else:
            tables.setdefault((match[3], int(match[2])), {})[int(match[1])] = value
    for (name, shards), parts in tables.items():
        rows = sum(map(len, parts.values()))
        if any(len(parts.get(shard, ())) != len(range(shard, rows, shards)) for shard in range(shards)):
            raise CorruptBackupError(f"{path} does not hold each row of {name!r} once")
        joined[name] = np.empty((rows, *parts[0].shape[1:]), parts[0].dtype)
        for shard, part in parts.items():
            joined[name][shard::shards] = part
    return joined


def is_split(shared: Iterable[str]) -> bool:
    """Returns whether a shared part belongs to a backup whose ranks hold pieces of values, or rows of tables."""
    return any(key.startswith(_SHAPE) for key in shared)


def without_pieces(own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rank's part without its pieces of split values, and its rows of tables."""
    return {key: value for key, value in own.items() if not (_PIECE.fullmatch(key) or _ROWS.fullmatch(key))}


@dataclasses.dataclass(frozen=True)
class _Piece:
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def place_in(self, whole: np.ndarray) -> np.ndarray | None:
        """Returns the elements of a whole value that are this piece's, or None if it has no such elements."""
        if len(self.shape) == 1:
            whole = whole.reshape(-1)
        if not len(self.begin) == len(self.shape) == whole.ndim:
            return None
        ends = np.add(self.begin, self.shape)
        if np.any(ends > whole.shape):
            return None
        return whole[tuple(map(slice, self.begin, ends))]


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """A value that a backup holds in pieces, which are read when NumPy makes an array of it, so that memory holds one such value at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Sequence[_Piece]

    def is_whole(self) -> bool:
        """Returns whether each element is in one piece."""
        is_held = np.zeros(self.shape, bool)
        for piece in self.pieces:
            place = piece.place_in(is_held)
            if place is None or place.any():
                return False
            place[...] = True
        return bool(is_held.all())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.empty(self.shape, self.dtype)
        for piece in self.pieces:
            place = piece.place_in(whole)
            assert place is not None  # noqa: S101 (for the type checker: `is_whole` has tested it)
            place[...] = piece.read()
        return np.asarray(whole, dtype)


def join(
    shared: Mapping[str, np.ndarray],
    parts: Iterable[Mapping[str, np.ndarray]],
    path: str,
    read: Callable[[int, str], np.ndarray] | None = None,
) -> dict[str, Any]:
    """Returns the shared part with whole values and tables in place of their shapes; `parts` are the parts of all ranks.

    `read` reads a tensor of a rank's part again, once the value is needed; None keeps the tensors of `parts`. Raises CorruptBackupError
    unless each element of a value is in one piece.
    """
    pieces: dict[str, list[_Piece]] = {}
    dtypes: dict[str, np.dtype] = {}
    rows: dict[str, np.ndarray] = {}
    for rank, own in enumerate(parts):
        for key, value in own.items():
            match = _PIECE.fullmatch(key)
            if match:
                again = functools.partial(read, rank, key) if read else functools.partial(np.asarray, value)
                begin = tuple(map(int, match[1].split(",")))
                pieces.setdefault(match[2], []).append(_Piece(begin, value.shape, again))
                dtypes[match[2]] = value.dtype
            elif _ROWS.fullmatch(key):
                rows[key] = value
    joined: dict[str, Any] = {**join_tables(rows, path)}
    for key, value in shared.items():
        if key.startswith(_SHAPE):
            name = key.removeprefix(_SHAPE)
            if name not in joined:  # not a table
                stored = StoredValue(tuple(value.tolist()), dtypes.get(name, np.dtype(bool)), pieces.get(name, []))
                if not stored.is_whole():
                    raise CorruptBackupError(f"{path} does not hold {name!r} once")
                joined[name] = stored
        else:
            joined[key] = value
    return joined
