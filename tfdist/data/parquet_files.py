"""`ParquetFiles`: rows of Parquet files, whose blocks are row groups."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.data import stored_files
from tfdist.data.epoch_order import WINDOW
from tfdist.data.row_source import RowSource
from tfdist.errors import ConfigError, list_first

_WINDOW_BYTES = 128 << 20
_STRINGS: tuple[type[Any], tuple[int, ...]] = (object, ())  # the type and the shape of a row of strings or bytes


@dataclasses.dataclass(frozen=True, eq=False)
class ParquetFile:
    """A Parquet file.

    Attributes:
        path: The file.
        metadata: pyarrow's metadata of the file.
        columns: The Arrow type of each column.
        sizes: The number of rows in each row group.
        version: The file's version when it was opened.
    """

    path: str
    metadata: Any
    columns: Mapping[str, Any]
    sizes: list[int]
    version: stored_files.Version

    def read(self, group: int, names: Sequence[str]) -> list[Any]:
        """Returns columns of a row group as pyarrow's arrays. Raises ValueError that names the file, the row group and the column."""
        import pyarrow as pa
        from pyarrow import parquet

        stored_files.check_unchanged(self.path, self.version)
        with parquet.ParquetFile(
            self.path, metadata=self.metadata, memory_map=True, pre_buffer=False, page_checksum_verification=True
        ) as file:
            columns = []
            for name in names:
                where = f"{self.path}, row group {group}, column {name!r}"
                try:
                    (column,) = file.read_row_group(group, [name], use_threads=False).columns
                    if _tensor_type(column.type) == _STRINGS:
                        # Offsets of 64 bits: a row group may hold more than 2 GB.
                        column = column.cast(pa.large_binary())
                    array = column.combine_chunks()
                    if isinstance(array, pa.ChunkedArray):
                        array = array.combine_chunks()
                except (OSError, ValueError, pa.ArrowException) as e:
                    reason = " ".join(str(e).split())
                    raise ValueError(
                        f"{where} cannot be read: {reason}. Write the file again, or restore it from a copy."
                    ) from e
                if len(array) != self.sizes[group]:
                    raise ValueError(
                        f"{where} has {len(array)} rows, and {self.sizes[group]} are expected. Write the file again."
                    )
                columns.append(_without_nulls(array, where))
            return columns


class ParquetFiles(RowSource):
    """Rows of Parquet files. Row groups are decoded as a whole; those of two windows stay in memory.

    Args:
        files: The files.
        columns: The structure of a row: names of columns in tuples, lists and dicts.
        window: The number of rows that are shuffled among each other; None chooses it by the bytes of a row.

    Attributes:
        window: As the argument, or the number chosen.

    Raises:
        ConfigError: A column is missing, has nulls or an unsupported type, or the files' types differ.
    """

    origin = "arrays_from"

    def __init__(self, files: Sequence[ParquetFile], columns: Structure, window: int | None):
        names = tf.nest.flatten(columns)
        self._names = list(dict.fromkeys(names))
        self._columns = [self._names.index(name) for name in names]
        stored_files.raise_all(_faults(files, self._names))
        types = [_tensor_type(files[0].columns[name]) for name in names]
        self._types = [kind for kind in types if kind]  # `_faults` has an error for others
        specs = [tf.TensorSpec(shape, tf.as_dtype(dtype)) for dtype, shape in self._types]
        self.spec = tf.nest.pack_sequence_as(columns, specs)
        self._groups = [(file, group) for file in files for group in range(len(file.sizes))]
        self.sizes = np.array([file.sizes[group] for file, group in self._groups], np.int64)
        self.identity = repr(
            [(os.path.basename(f.path), f.sizes, [(n, str(f.columns[n])) for n in self._names]) for f in files]
        )
        self.version = stored_files.describe((file.path, file.version) for file in files)
        if window is None:
            window = self._default_window(files)
        self.window = int(window)
        self._most_rows = 2 * (self.window + int(self.sizes.max(initial=0)))
        self._decoded: collections.OrderedDict[int, list[Any]] = collections.OrderedDict()
        self._locks: collections.defaultdict[int, threading.Lock] = collections.defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def read(self, blocks: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        read = [np.empty((len(rows), *shape), dtype) for dtype, shape in self._types]
        for block in np.unique(blocks).tolist():
            indices = np.flatnonzero(blocks == block)
            decoded = self._block(block)
            for column, values in zip(self._columns, read, strict=True):
                if values.dtype == object:
                    values[indices] = decoded[column].take(rows[indices]).to_numpy(zero_copy_only=False)
                else:
                    values[indices] = decoded[column][rows[indices]]
        return read

    def _block(self, block: int) -> list[Any]:
        """Returns a decoded row group: arrays of numbers, and pyarrow's arrays of bytes."""
        # A lock for each row group: parallel reads decode it once, and different ones at once.
        with self._lock:
            lock = self._locks[block]
        with lock:
            with self._lock:
                if block in self._decoded:
                    self._decoded.move_to_end(block)
                    return self._decoded[block]
            file, group = self._groups[block]
            decoded = file.read(group, self._names)
            for column, kind in dict(zip(self._columns, self._types, strict=True)).items():
                if kind != _STRINGS:
                    decoded[column] = _numbers(decoded[column], int(self.sizes[block]), *kind)
            with self._lock:
                self._decoded[block] = decoded
                while len(self._decoded) > 1 and self.sizes[list(self._decoded)].sum() > self._most_rows:
                    self._decoded.popitem(last=False)
            return decoded

    def _default_window(self, files: Sequence[ParquetFile]) -> int:
        """Returns the number of rows that take some 128 MB when they are decoded."""
        stored = sum(
            chunk.total_uncompressed_size
            for file in files
            for group in range(len(file.sizes))
            for chunk in map(file.metadata.row_group(group).column, range(file.metadata.num_columns))
            if chunk.path_in_schema.split(".")[0] in self._names
        )
        # Numbers that are encoded, such as by a dictionary, take less space in the file than in memory.
        numbers = sum(math.prod(kind[1]) * np.dtype(kind[0]).itemsize for kind in self._types if kind != _STRINGS)
        row_bytes = max(stored // max(int(self.sizes.sum()), 1), numbers, 1)
        return max(1, min(WINDOW, _WINDOW_BYTES // row_bytes))


def open_files(paths: Sequence[str]) -> list[ParquetFile]:
    """Opens Parquet files. Raises ConfigError if pyarrow is not installed, or with the errors of all files."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as e:
        raise ConfigError(f"{paths[0]} needs pyarrow: pip install 'tfdist[parquet]'") from e
    files = []
    faults = []
    for path in paths:
        try:
            opened = stored_files.version(os.stat(path))
            with parquet.ParquetFile(path, memory_map=True) as file:
                columns = {field.name: field.type for field in file.schema_arrow}
                metadata = file.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            files.append(ParquetFile(path, metadata, columns, sizes, opened))
        except (OSError, ValueError, pa.ArrowException) as e:
            reason = " ".join(str(e).split())
            faults.append(f"{path} cannot be read: {reason} Write the file again, or restore it from a copy.")
    stored_files.raise_all(faults)
    return files


def _faults(files: Sequence[ParquetFile], names: Sequence[str]) -> Iterator[str]:
    """Yields an error for each column that a file lacks, that cannot be a tensor, that has nulls, or whose types differ."""
    for file in files:
        for name in names:
            if name not in file.columns:
                yield (
                    f"{file.path} lacks column {name!r}. Add it, or name others in `columns`: "
                    f"{list_first(sorted(file.columns), stored_files.MOST_FAULTS)}."
                )
                continue
            kind = file.columns[name]
            first = files[0].columns.get(name, kind)
            if _tensor_type(kind) is None:
                yield (
                    f"{file.path}, column {name!r} has the type {kind}. Write numbers, booleans, strings, bytes, or lists of a fixed "
                    "size (pyarrow.list_(type, size))."
                )
            elif _tensor_type(kind) != _tensor_type(first):
                yield (
                    f"The files must have one type of column {name!r}. Received: {first} in {files[0].path}, {kind} in {file.path}."
                )
    for file in files:
        for name in names:
            for group in range(len(file.sizes)):
                nulls = _nulls(file.metadata.row_group(group), name)
                if nulls:
                    yield _null_message(f"{file.path}, row group {group}, column {name!r}", nulls)
                    break


def _nulls(group: Any, name: str) -> int:
    """Returns the number of nulls of a column that the metadata of a row group holds."""
    for chunk in map(group.column, range(group.num_columns)):
        if chunk.path_in_schema.split(".")[0] == name and chunk.is_stats_set and chunk.statistics.has_null_count:
            return int(chunk.statistics.null_count)
    return 0


def _null_message(where: str, nulls: int) -> str:
    return f"{where} has {nulls} nulls. Write the file with values instead, or without these rows."


def _without_nulls(array: Any, where: str) -> Any:
    """Returns an array, or the values of its lists. Raises ValueError if there are nulls."""
    import pyarrow as pa

    if array.null_count:
        raise ValueError(_null_message(where, array.null_count))
    if pa.types.is_fixed_size_list(array.type):
        return _without_nulls(array.flatten(), where)
    return array


def _numbers(array: Any, rows: int, dtype: type[Any], shape: tuple[int, ...]) -> np.ndarray:
    values = array.to_numpy(zero_copy_only=False)
    return values.astype(dtype, copy=False).reshape(rows, *shape)


@functools.lru_cache(256)
def _tensor_type(kind: Any) -> tuple[type[Any], tuple[int, ...]] | None:
    """Returns the NumPy type and the shape of a row of an Arrow type, or None if it has none."""
    from pyarrow import types

    shape: list[int] = []
    while types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()).type, tuple(shape)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    if (is_text or is_bytes) and not shape:
        return _STRINGS
    return None
