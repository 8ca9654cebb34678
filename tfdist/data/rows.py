"""`rows_from`: training data from any source of rows: arrays, a `datasets.Dataset`, HDF5, grain, or an object of the user."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.data import arrow_rows, hdf5_rows
from tfdist.data.epoch_order import WINDOW
from tfdist.data.row_source import RowSource, block_rows
from tfdist.data.stored import StoredData, check_options
from tfdist.data.stored_files import MOST_FAULTS
from tfdist.errors import ConfigError, format_value, list_first

Gather = Callable[[np.ndarray], Structure]  # from the indices of rows to arrays `[len(indices), ...]`

_SAMPLE = 64  # rows whose checksum is part of the identity of stored rows
_EXPECTED = (
    "The source of rows_from must be NumPy arrays or h5py data sets (in tuples and dicts) of equal lengths, a datasets.Dataset, a source of grain, "
    "or an object with __len__() and __getitem__(indices) that returns arrays of len(indices) rows"
)


class Rows(RowSource):
    """The rows of a source of `rows_from`.

    Args:
        source: The source.
        columns: The structure of a row, of names of columns; None keeps the structure of the source.
    """

    origin = "rows_from"

    def __init__(self, source: Any, columns: Structure | None):
        self._columns = columns
        length, self._gather, is_stored = _open(source, columns)
        if not length:
            raise ConfigError(f"source holds no rows. Give one that has some. Received: {_kind(source)}.")
        # The rows of an object may cost a computation, so only its first and last one are read here.
        sample = np.linspace(0, length - 1, _SAMPLE if is_stored else 2).astype(np.int64)
        try:
            rows = self._rows(sample)
            leaves = [_leaf(leaf, len(sample)) for leaf in tf.nest.flatten(rows)]
            specs = [tf.TensorSpec(leaf.shape[1:], tf.as_dtype(leaf.dtype)) for leaf in leaves]
        except ConfigError:
            raise
        except (TypeError, ValueError) as e:
            raise ConfigError(f"{e} {_EXPECTED}. Received: {_kind(source)}.") from e
        self.spec = tf.nest.pack_sequence_as(rows, specs)
        self._specs = specs
        size = block_rows(length, sum(leaf.nbytes for leaf in leaves) // len(sample))
        self._block_rows = size
        self.sizes = np.minimum(length - np.arange(0, length, size), size)
        self.identity = f"{length} {self.spec}"
        if is_stored:
            self.identity += f" {[zlib.crc32(_bytes(leaf)) for leaf in leaves]}"

    def read(self, blocks: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        indices = blocks * self._block_rows + rows
        try:
            structure = self._rows(indices)
            tf.nest.assert_same_structure(self.spec, structure)
            leaves = [_leaf(leaf, len(indices)) for leaf in tf.nest.flatten(structure)]
        except TypeError as e:
            raise ValueError(str(e).splitlines()[0]) from e
        for spec, leaf in zip(self._specs, leaves, strict=True):
            if leaf.shape[1:] != spec.shape or tf.as_dtype(leaf.dtype) != spec.dtype:
                raise ValueError(
                    f"source[indices] must return rows of one type and shape. Expected: {spec.dtype.name}{list(spec.shape)}, as its first "
                    f"row. Received: {leaf.dtype}{list(leaf.shape[1:])}, for the rows from {indices[0]:,} on. Cast or pad them."
                )
        return leaves

    def _rows(self, indices: np.ndarray) -> Structure:
        """Returns the rows in the structure of a batch. Raises ValueError, also for an error of the user's code."""
        try:
            rows = self._gather(indices)
        except Exception as e:
            reason = (str(e).splitlines() or [""])[0]
            raise ValueError(f"source[indices] has raised {type(e).__name__} ({reason}). Correct the source.") from e
        if self._columns is None:
            return rows
        _check_columns(self._columns, rows if isinstance(rows, dict) else ())
        return tf.nest.map_structure(rows.__getitem__, self._columns)


def rows_from(
    source: Any,
    batch_size: int = 64,
    seed: int = 0,
    shuffle: bool = True,
    map: Callable[..., Structure] | None = None,
    columns: Structure | None = None,
    window: int = WINDOW,
) -> StoredData:
    """Makes data for `fit`, `evaluate`, `predict` and `validation_data` from a source of rows, which may be larger than memory.

        class Squares:  # the least source
            def __len__(self):
                return 1000

            def __getitem__(self, indices):
                x = indices.astype("float32")
                return x[:, None], x**2

        data = tfdist.data.rows_from(Squares(), batch_size=64)
        model.fit(data, epochs=3)

    A source has a length, and `source[indices]` returns the rows at `indices`: an int64 array, in any order, in which an index may
    occur twice. The rows are an array `[len(indices), ...]`, or a tuple or dict of such arrays, in types and shapes that all rows
    share. Arrays of strings or bytes become string tensors; all other types stay as they are. Several threads call the source.
    A row must be the same at each read, on every worker and in every run, and returned arrays must not change later.

    Each worker reads only its replicas' rows, in parallel and ahead of the steps, as with `arrays_from`: each row counts once in an
    epoch, for any number of workers and replicas, `fit` shuffles by a pure function of `seed` and the epoch, and a resumed
    training continues at the row. All workers need the source.

    Args:
        source: One of these:

            - NumPy arrays or memory maps of equal lengths, in tuples and dicts.
            - A `datasets.Dataset` of Hugging Face (`pip install 'tfdist[datasets]'`), whose rows are dicts. Numbers, and lists and
              arrays of numbers of one size, are read where the Arrow files are mapped into memory, also after `select`, `shuffle` and
              `concatenate_datasets`, in their stored types. Strings, bytes, booleans and images (the bytes of the files) are
              read by Arrow, which is slower. Lists of several lengths and nulls are an error. A format is ignored, except a
              transform (`set_transform`), which must return arrays.
            - `h5py` data sets, in tuples and dicts. A contiguous one of a file that is open for reading is mapped into memory;
              a chunked or compressed one is read by HDF5, which is slower.
            - A source of grain (a subclass of `RandomAccessDataSource`, or a `MapDataset`), which is read row by row.
            - An object with `__len__` and `__getitem__(indices)`, as above.
        batch_size: Examples per step over all replicas.
        seed: The seed of the shuffling.
        shuffle: Whether `fit` shuffles the rows; also `fit(shuffle=False)` keeps their order.
        map: A function of a batch, in TensorFlow operations (see `arrays_from`).
        columns: The structure of a batch, of names of the source's columns, such as `("image", "label")`; other columns of a
            `datasets.Dataset` are not read. None means the structure of the source: a dict is the model's inputs.
        window: The number of rows that are shuffled among each other. Blocks of at most 1 MB of neighboring rows are shuffled over
            all rows.

    Returns:
        The data. `dataset()` returns a plain `tf.data` pipeline of the same batches.

    Raises:
        ConfigError: The source has no rows, cannot be read or has columns of unequal lengths, or an option is out of range.

    Examples:
        >>> import numpy as np, tfdist.data
        >>> tfdist.data.rows_from((np.ones((6, 4)), np.ones(6)), batch_size=4).steps_per_epoch
        2
    """
    faults = check_options(batch_size, seed, map, window)
    if isinstance(columns, str):
        columns = (columns,)
    names = tf.nest.flatten(columns)
    if columns is not None and not (names and all(isinstance(name, str) for name in names)):
        faults.append(f"columns must be names of columns, such as ('x', 'y'). Received: {format_value(columns)}.")
    if faults:
        raise ConfigError(faults)
    return StoredData(Rows(source, columns), batch_size, seed, shuffle, map, window)


def _open(source: Any, columns: Structure | None) -> tuple[int, Gather, bool]:
    """Returns the number of rows, the function that reads some, and whether they are stored, and so cost little."""
    if _is_of("datasets", "DatasetDict", source):
        raise ConfigError(
            f"source must be one split, such as source[{next(iter(source), 'train')!r}]. Received: {_kind(source)}."
        )
    if _is_of("datasets", "Dataset", source) and source.format["type"] != "custom":
        names = source.column_names
        if columns is not None:
            _check_columns(columns, names)
            names = list(dict.fromkeys(tf.nest.flatten(columns)))
        return len(source), arrow_rows.open_dataset(source, names), True
    leaves = tf.nest.flatten(source)
    if leaves and all(isinstance(leaf, np.ndarray) or _is_of("h5py", "Dataset", leaf) for leaf in leaves):
        lengths = {leaf.shape[0] if leaf.shape else "a single number" for leaf in leaves}
        if len(lengths) > 1 or not isinstance(length := lengths.pop(), int):
            raise ConfigError(
                f"The arrays of source must have equal numbers of rows. Received: {[leaf.shape for leaf in leaves]}."
            )
        columns_of = [
            np.asarray(leaf).take if isinstance(leaf, np.ndarray) else hdf5_rows.open_dataset(leaf) for leaf in leaves
        ]
        return length, lambda i: tf.nest.pack_sequence_as(source, [read(i, axis=0) for read in columns_of]), True
    if isinstance(source, (tuple, list, dict)) or not all(hasattr(source, name) for name in ("__len__", "__getitem__")):
        raise ConfigError(f"{_EXPECTED}. Received: {_kind(source)}.")
    if any(base.__module__.partition(".")[0] in ("grain", "array_record") for base in type(source).__mro__):
        return len(source), lambda i: _stack([source[index] for index in i.tolist()]), False
    return len(source), source.__getitem__, False


def _check_columns(columns: Structure, found: Iterable[str]) -> None:
    """Raises ConfigError for names that no column of the source has."""
    missing = sorted(set(tf.nest.flatten(columns)) - set(found))
    if missing:
        raise ConfigError(
            f"columns must be names of the source's columns: {list_first(sorted(found), MOST_FAULTS) or 'none, as its rows are no dict'}. "
            f"Received: {format_value(columns)}."
        )


def _is_of(module: str, name: str, value: Any) -> bool:
    """Returns whether a value is of a package's class. A package that is not loaded has no objects."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def _kind(source: Any) -> str:
    return f"{type(source).__module__}.{type(source).__qualname__}"


def _stack(records: list[Structure]) -> Structure:
    """Returns single rows as arrays of rows."""

    def column(*values: Any) -> np.ndarray:
        if isinstance(values[0], (bytes, str)):  # NumPy would strip zeros at the end of bytes
            return np.array(values, object)
        return np.stack(values)

    return tf.nest.map_structure(column, *records)


def _leaf(leaf: Any, rows: int) -> np.ndarray:
    """Returns an array of rows, in a type that TensorFlow reads. Raises ValueError if it is none."""
    if not hasattr(leaf, "__array__") or (array := np.asarray(leaf)).shape[:1] != (rows,):
        received = f"{array.dtype}{list(array.shape)}" if hasattr(leaf, "__array__") else format_value(leaf)
        raise ValueError(f"source[indices] must return arrays of {rows} rows for {rows} indices. Received: {received}.")
    if array.dtype == object and not all(isinstance(value, (bytes, str)) for value in array.flat):
        raise ValueError(
            f"source[indices] must return arrays of numbers, strings or bytes. Received: {format_value(array.flat[0])}."
        )
    if array.dtype.kind == "U":
        return np.char.encode(array, "utf-8").astype(object)
    if array.dtype.kind == "S":
        return array.astype(object)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _bytes(leaf: np.ndarray) -> bytes:
    """Returns the contents of an array. The bytes of object arrays are addresses."""
    if leaf.dtype == object:
        return repr(leaf.tolist()).encode()
    return leaf.tobytes()
