"""`arrays_from`: training data in `.npy` and `.npz` files, which are mapped into memory and read row by row."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import re
import struct
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.data import stored_files
from tfdist.data.epoch_order import WINDOW
from tfdist.data.row_source import RowSource, block_rows
from tfdist.data.stored import StoredData, check_options
from tfdist.errors import ConfigError, format_value, list_first

_ENDINGS = (".npy", ".npz")
KERAS_COLUMNS = ("x", "y", "sample_weight")
_SHARD = re.compile(r"(.+?)-(\d+)(?:-of-\d+)?")  # the column and the number of a shard, in its file's name
MOST_MAPS = 256  # maps that are open at once: each holds a file descriptor
LONG_ROW = 2048  # bytes, from which on a second copy of a row costs more than a call of NumPy
# Of a zip file's member: signature, lengths of the name and of the extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclasses.dataclass(frozen=True, eq=False)
class StoredArray:
    """An array in a file.

    Attributes:
        path: The file.
        member: The name of the array in an `.npz` file, else "".
        offset: The position of the first row in the file.
        length: The number of rows.
        shape: The shape of a row.
        dtype: The type of a row.
        version: The file's size, time of change and inode when it was opened.
    """

    path: str
    member: str
    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    version: stored_files.Version

    @property
    def name(self) -> str:
        if not self.member:
            return self.path
        return f"{self.path}[{self.member!r}]"

    @functools.cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self) -> np.ndarray:
        """Maps the rows as bytes, `[length, row_bytes]`: NumPy would copy an entire array that is not aligned."""
        if not self.length * self.row_bytes:
            return np.zeros((self.length, self.row_bytes), np.uint8)
        shape = (self.length, self.row_bytes)
        return np.asarray(np.memmap(self.path, np.uint8, "r", self.offset, shape))

    def typed(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows of bytes as rows of the array's type, in this machine's byte order."""
        if not self.row_bytes:
            return np.zeros((len(rows), *self.shape), self.dtype.newbyteorder("="))
        values = rows.view(self.dtype).reshape(len(rows), *self.shape)
        return values.astype(self.dtype.newbyteorder("="), copy=False)


class ArrayFiles(RowSource):
    """Rows of arrays that shards hold under the same names.

    Args:
        shards: For each shard its arrays, by column.
        columns: The structure of a row: names of columns in tuples, lists and dicts.
    """

    origin = "arrays_from"

    def __init__(self, shards: Sequence[Mapping[str, StoredArray]], columns: Structure):
        names = tf.nest.flatten(columns)
        self._shards = [[shard[name] for name in names] for shard in shards]
        first = self._shards[0]
        specs = [tf.TensorSpec(array.shape, tf.as_dtype(array.dtype.newbyteorder("="))) for array in first]
        self.spec = tf.nest.pack_sequence_as(columns, specs)
        lengths = np.array([arrays[0].length for arrays in self._shards], np.int64)
        row_bytes = sum(array.row_bytes for array in first)
        self._block_rows = block_rows(int(lengths.sum()), row_bytes)
        # A block has rows of one shard. Blocks count over all shards, and within each.
        counts = -(-lengths // self._block_rows)
        self._shard_of_block = np.repeat(np.arange(len(lengths)), counts)
        self._block_in_shard = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        self.sizes = np.minimum(
            lengths[self._shard_of_block] - self._block_in_shard * self._block_rows, self._block_rows
        )
        self.identity = repr(
            [
                (os.path.basename(a.path), a.member, a.length, a.shape, a.dtype.str)
                for arrays in self._shards
                for a in arrays
            ]
        )
        self._maps: collections.OrderedDict[StoredArray, np.ndarray] = collections.OrderedDict()
        self._lock = threading.Lock()

    def read(self, blocks: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        rows = self._block_in_shard[blocks] * self._block_rows + rows
        if len(self._shards) == 1:
            return [array.typed(self._rows(array)[rows]) for array in self._shards[0]]
        shards = self._shard_of_block[blocks]
        by_shard = [(shard, np.flatnonzero(shards == shard)) for shard in set(shards.tolist())]
        return [
            self._shards[0][column].typed(self._gather(column, rows, by_shard))
            for column in range(len(self._shards[0]))
        ]

    def _gather(self, column: int, rows: np.ndarray, by_shard: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
        """Returns the bytes of a column's rows in several shards; `by_shard` holds the indices of the rows in each."""
        gathered = np.empty((len(rows), self._shards[0][column].row_bytes), np.uint8)
        for shard, indices in by_shard:
            array = self._rows(self._shards[shard][column])
            # `array[rows]` copies the rows, and the assignment copies them once more.
            if gathered.shape[1] < LONG_ROW:
                gathered[indices] = array[rows[indices]]
            else:
                for index, row in zip(indices.tolist(), rows[indices].tolist(), strict=True):
                    gathered[index] = array[row]
        return gathered

    def _rows(self, array: StoredArray) -> np.ndarray:
        stored_files.check_unchanged(array.path, array.version)
        # A map that is dropped closes once no thread reads its rows.
        with self._lock:
            if array not in self._maps:
                self._maps[array] = array.map()
                if len(self._maps) > MOST_MAPS:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(array)
            return self._maps[array]


def arrays_from(
    path: str | os.PathLike[str],
    batch_size: int = 64,
    seed: int = 0,
    shuffle: bool = True,
    map: Callable[..., Structure] | None = None,
    columns: Structure | None = None,
    window: int = WINDOW,
) -> StoredData:
    """Opens arrays in files, which may be larger than memory, as data for `fit`, `evaluate`, `predict` and `validation_data`.

        data = tfdist.data.arrays_from("images", batch_size=64)  # images/x.npy and images/y.npy
        model.fit(data, epochs=3)

    The files are mapped into memory, and each worker reads only its replicas' rows, in parallel and ahead of the steps. Each
    example counts once in an epoch, for any number of workers and replicas. `fit` shuffles: the order is a pure function of
    `seed` and the epoch, so a resumed training reads no example that was used. `evaluate` and `predict` read in order. With
    `steps_per_epoch`, an epoch of `fit` continues in the data where the last one has ended.

    Args:
        path: A folder, or a pattern such as `"images/train-*.npz"`. The files are either `.npy` files, whose names are the
            columns (`x.npy`; or in shards, `x-00000.npy`, `x-00001.npy`), or `.npz` files, each a shard that holds all columns, as
            `np.savez` writes them. Shards may have unequal lengths. For files of other formats see `rows_from`.
        batch_size: Examples per step over all replicas.
        seed: The seed of the shuffling.
        shuffle: Whether `fit` shuffles the examples; also `fit(shuffle=False)` keeps their order.
        map: A function of a batch, in TensorFlow operations; it receives the columns of one replica's part of a batch as
            arguments, like a function of `Dataset.map`, and must treat examples alike in any batch. Random numbers that it draws do
            not resume exactly: put augmentation into layers of the model.
        columns: The structure of a batch, such as `("images", "labels")` or `({"a": "a", "b": "b"}, "y")`. None means those of
            `x`, `y` and `sample_weight` that exist, in this order.
        window: The number of examples that are shuffled among each other. Blocks of at most 1 MB of neighboring examples are
            shuffled over all data.

    Returns:
        The data. `dataset()` returns a plain `tf.data` pipeline of the same batches.

    Raises:
        ConfigError: There are no files; a column is missing; columns or shards do not fit each other; a file is truncated, compressed
            or holds Python objects; or an option is out of range. The error names all such files.

    Examples:
        >>> import os, tempfile, numpy as np, tfdist.data
        >>> folder = tempfile.mkdtemp()
        >>> np.save(os.path.join(folder, "x.npy"), np.ones((6, 4)))
        >>> np.save(os.path.join(folder, "y.npy"), np.ones(6))
        >>> tfdist.data.arrays_from(folder, batch_size=4).steps_per_epoch
        2
    """
    faults = check_options(batch_size, seed, map, window)
    if faults:
        raise ConfigError(faults)
    path = os.fspath(path)
    files = stored_files.find(path, _ENDINGS)
    kinds = sorted({os.path.splitext(file)[1] for file in files})
    if not files:
        raise ConfigError(
            f"{path} holds no .npy or .npz file: give a folder that does, or a pattern that matches some. For Parquet, CSV, "
            "JSON, text or images use tfdist.data.rows_from(datasets.load_dataset(...))."
        )
    if len(kinds) > 1:
        raise ConfigError(
            f"{path} holds {' and '.join(kinds)} files: give a pattern that matches one kind, such as '*{kinds[-1]}'."
        )
    shards = _open(files)
    columns = _structure(columns, {name for _, arrays in shards for name in arrays}, path)
    stored_files.raise_all(_differences(shards, tf.nest.flatten(columns)))
    source = ArrayFiles([arrays for _, arrays in shards], columns)
    if not source.sizes.sum():
        names = ", ".join(tf.nest.flatten(columns))
        raise ConfigError(f"{path} holds no examples: the arrays {names} have length 0. Write some.")
    return StoredData(source, batch_size, seed, shuffle, map, window)


def _open(files: Sequence[str]) -> list[tuple[str, dict[str, StoredArray]]]:
    """Returns the name of each shard, and its arrays by column. Raises ConfigError with the errors of all files."""
    shards: dict[tuple[int, str], dict[str, StoredArray]] = {}
    faults = []
    for file in files:
        try:
            name = os.path.basename(file)
            if file.endswith(".npz"):
                shards[0, name] = dict(_npz_arrays(file))
                continue
            column = name.removesuffix(".npy")
            key = (0, "")
            match = _SHARD.fullmatch(column)
            if match:
                column = match[1]
                number = int(match[2])
                key = (number, f"shard {number}")
            with open(file, "rb") as opened:
                shards.setdefault(key, {})[column] = _npy_array(opened, file)
        except (OSError, ValueError) as e:
            faults.append(f"{file} cannot be read: {e}")
    stored_files.raise_all(faults)
    return [(name, shards[number, name]) for number, name in sorted(shards)]


def _npz_arrays(path: str) -> Iterator[tuple[str, StoredArray]]:
    """Yields the name and the position of each array in an `.npz` file."""
    try:
        members = zipfile.ZipFile(path).infolist()
    except zipfile.BadZipFile as e:
        raise ValueError(f"it is not a complete .npz file ({e}). Write it again.") from e
    with open(path, "rb") as file:
        for member in members:
            name = member.filename.removesuffix(".npy")
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"array {name!r} is compressed, and only uncompressed arrays can be mapped into memory. Write the file "
                    "with np.savez, not np.savez_compressed."
                )
            file.seek(member.header_offset)
            signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            if signature != b"PK\3\4":
                raise ValueError(
                    f"array {name!r} is not where the file's directory says. Write the file again with np.savez."
                )
            file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
            yield name, _npy_array(file, path, name)


def _npy_array(file: IO[bytes], path: str, member: str = "") -> StoredArray:
    """Reads the header of an array that begins at the position of an open file. Raises ValueError if its rows cannot be mapped."""
    what = f"array {member!r}" if member else "it"
    read_header = np.lib.format.read_array_header_2_0
    major, _ = np.lib.format.read_magic(file)
    if major == 1:
        read_header = np.lib.format.read_array_header_1_0
    shape, fortran_order, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError(f"{what} holds Python objects, which are not unpickled. Save an array of numbers.")
    if dtype.kind not in "biufc" or dtype.itemsize > 16 or dtype == np.longdouble:
        raise ValueError(f"{what} has the type {dtype}. Save numbers or booleans.")
    if not shape:
        raise ValueError(
            f"{what} is a single number, not an array of examples. Name the arrays of examples in `columns`, or remove it."
        )
    if fortran_order and len(shape) > 1:
        raise ValueError(f"the rows of {what} are scattered (Fortran order). Save np.ascontiguousarray(array).")
    stat = os.fstat(file.fileno())
    array = StoredArray(path, member, file.tell(), shape[0], tuple(shape[1:]), dtype, stored_files.version(stat))
    needed = array.offset + array.length * array.row_bytes
    if stat.st_size < needed:
        raise ValueError(f"{what} is truncated: the file has {stat.st_size:,} bytes, and its header needs {needed:,}.")
    return array


def _structure(columns: Structure | None, names: set[str], path: str) -> Structure:
    """Returns the structure of a row; by default, the columns of Keras' names. Raises ConfigError if that is not possible."""
    if columns is None:
        if "x" not in names or names - {*KERAS_COLUMNS}:
            raise ConfigError(
                f"{path} holds the arrays {list_first(sorted(names), stored_files.MOST_FAULTS)}. Only x, y and sample_weight are "
                "used without columns: name the arrays of a batch, such as columns=('images', 'labels')."
            )
        return tuple(name for name in KERAS_COLUMNS if name in names)
    if isinstance(columns, str):
        columns = (columns,)
    wanted = tf.nest.flatten(columns)
    if not wanted or not all(isinstance(name, str) for name in wanted):
        raise ConfigError(f"columns must be names of arrays, such as ('x', 'y'). Received: {format_value(columns)}.")
    return columns


def _differences(shards: Sequence[tuple[str, Mapping[str, StoredArray]]], names: Sequence[str]) -> Iterator[str]:
    """Yields an error for each shard that lacks a column, or whose arrays do not fit each other or those of the first shard."""
    firsts: dict[str, StoredArray] = {}
    for shard, arrays in shards:
        where = f"{shard} lacks" if shard else "there is no"
        missing = [name for name in names if name not in arrays]
        for name in missing:
            yield f"{where} array {name!r}. Add it, or name others in `columns`: {list_first(sorted(arrays), stored_files.MOST_FAULTS)}."
        present = [arrays[name] for name in dict.fromkeys(names) if name in arrays]
        if len({array.length for array in present}) > 1:
            lengths = ", ".join(f"{array.length} in {array.name}" for array in present)
            yield f"Arrays of one shard must have the same number of examples. Received: {lengths}."
        for name in dict.fromkeys(names):
            array = arrays.get(name)
            if array is None:
                continue
            first = firsts.setdefault(name, array)
            if (array.dtype, array.shape) != (first.dtype, first.shape):
                yield (
                    f"The shards of {name!r} must have one type and shape. Received: {first.dtype}{list(first.shape)} in {first.name}, "
                    f"{array.dtype}{list(array.shape)} in {array.name}."
                )
