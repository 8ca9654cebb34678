"""A table whose rows several variables hold, and an optimizer's slots of it. Files hold each as the one array that Keras would write."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_files, keras_internals, laid_out
from tfdist.errors import ConfigError

MIN_ROWS = 65_536  # a smaller table is updated as a whole, and held by each worker: as fast
CHUNK_BYTES = 64 * 2**20
_TABLE = "_tfdist_table"  # the attribute of a variable that is a shard


@dataclasses.dataclass(eq=False)
class Layout:
    """The rows of a table that each of its variables holds: row `i` is row `i // count` of variable `i % count`. Slots share the layout of their table.

    Attributes:
        rows: The number of rows.
        count: The number of variables that hold all rows.
        held: The numbers of the variables that this process has: all, or that of this worker. Workers have variables of equal shape, so
            that the last row of some is unused.
        read: Returns some rows of a table with this layout, while all workers take part in a save; None otherwise.
    """

    rows: int
    count: int
    held: Sequence[int]
    read: Callable[[Table, range], np.ndarray] | None = None

    @property
    def is_on_workers(self) -> bool:
        """True if each worker holds some rows."""
        return len(self.held) < self.count


class Table:
    """A table, or an optimizer's slot of one.

    Attributes:
        shards: The variables of this process.
        layout: Which rows they hold.
        shape: The shape of the whole table.
        dtype: The type of the elements.
    """

    def __init__(self, shards: Sequence[keras.Variable], layout: Layout):
        self.shards = shards
        self.layout = layout
        self.shape = (layout.rows, *shards[0].shape[1:])
        self.dtype = tf.as_dtype(shards[0].dtype)

    @property
    def path(self) -> str:
        """The path of the first shard: equal for any number of shards."""
        return str(self.shards[0].path)

    @property
    def value(self) -> Table:
        """The table itself, where Keras' variables have a variable of TensorFlow."""
        return self

    def numpy(self) -> np.ndarray:
        """Returns the whole table."""
        values = np.empty(self.shape, self.dtype.as_numpy_dtype)
        self._copy_to(values)
        return values

    def assign(self, values: Any) -> None:
        """Sets all rows to those of an array, or of an HDF5 dataset."""
        if tuple(values.shape) != self.shape:
            raise ValueError(
                f"The table {self.path} must have shape {self.shape}: build the layer with the file's input_dim and output_dim. "
                f"Received: {tuple(values.shape)}."
            )
        for rows in self._chunks():
            chunk = values[rows.start : rows.stop]
            for shard, local, part in self._parts(rows):
                update = tf.IndexedSlices(tf.cast(chunk[part], self.dtype), tf.range(local.start, local.stop))
                _scatter(shard, update)

    def save(self, store: Any, key: str) -> None:
        """Writes the table to an entry of Keras' store, in chunks."""
        dataset = keras_files.new_dataset(store, key, self.shape, self.dtype)
        if dataset is None:
            store[key] = self.numpy()
        else:
            self._copy_to(dataset)

    def load(self, store: Any, key: str) -> None:
        """Reads the table from an entry of Keras' store, in chunks."""
        self.assign(keras_files.dataset(store, key))

    def rows_of(self, shard: int) -> int:
        """Returns the number of rows in a shard."""
        return len(range(shard, self.layout.rows, self.layout.count))

    @property
    def is_large(self) -> bool:
        """True if the table has several chunks."""
        return int(np.prod(self.shape)) * self.dtype.size > CHUNK_BYTES

    def chunk_from(self, begin: int) -> range:
        """Returns the chunk of rows that begins at a row: at most 64 MB, if each shard's row is smaller."""
        count = self.layout.count
        row_bytes = max(1, int(np.prod(self.shape[1:])) * self.dtype.size)
        step = max(1, CHUNK_BYTES // (row_bytes * count)) * count
        return range(begin, min(begin + step, self.layout.rows))

    def own_rows(self, rows: range) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields for each variable of this process the places of its rows in a chunk, and their values."""
        for shard, local, part in self._parts(rows):
            yield part, tf.gather(_components(shard)[0], tf.range(local.start, local.stop)).numpy()

    def _chunks(self) -> Iterator[range]:
        """Yields all rows in chunks. Each begins at the first shard."""
        begin = 0
        while begin < self.layout.rows:
            rows = self.chunk_from(begin)
            yield rows
            begin = rows.stop

    def _parts(self, rows: range) -> Iterator[tuple[keras.Variable, range, slice]]:
        """Yields for each variable its rows of a chunk, in its own numbers, and their places in the chunk."""
        count = self.layout.count
        first = rows.start // count
        for index, shard in zip(self.layout.held, self.shards, strict=True):
            yield shard, range(first, first + len(rows[index::count])), slice(index, None, count)

    def _copy_to(self, target: Any) -> None:
        """Copies all rows to an array or an HDF5 dataset."""
        for rows in self._chunks():
            target[rows.start : rows.stop] = self._read(rows)

    def _read(self, rows: range) -> np.ndarray:
        if self.layout.read is not None:
            return self.layout.read(self, rows)
        if self.layout.is_on_workers:
            raise ConfigError(
                f"Each worker holds some rows of the table {self.path}, so a worker cannot read the table by itself: call "
                "trainer.save, model.save or model.save_weights on all workers, and give a callback that does to all of them; or give the layer shards=1."
            )
        chunk = np.empty((len(rows), *self.shape[1:]), self.dtype.as_numpy_dtype)
        for part, values in self.own_rows(rows):
            chunk[part] = values
        return chunk


def _scatter(variable: keras.Variable, update: tf.IndexedSlices) -> None:
    for component in _components(variable):
        with tf.device(component.device):
            component.scatter_update(update)


def _components(variable: keras.Variable) -> Sequence[tf.Variable]:
    """Returns a variable's copies on the devices of this process."""
    value = keras_internals.raw_value(variable)
    strategy = getattr(value, "distribute_strategy", None)
    if strategy is None:
        return (value,)
    components: Sequence[tf.Variable] = strategy.experimental_local_results(value)
    return components


def local_copy(variable: keras.Variable) -> tf.Variable:
    """Returns this replica's copy of a variable: TensorFlow reads only some rows of it. Of a variable with several copies it reads all."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return variable.value
    copies = context.strategy.experimental_local_results(variable.value)
    if len(copies) == 1:
        return copies[0]
    # The replicas of a process have consecutive numbers.
    return copies[tf.get_static_value(context.replica_id_in_sync_group) % len(copies)]


def make_table(shards: Sequence[keras.Variable], layout: Layout) -> Table:
    """Returns the table of a layer's variables, and marks them as its shards."""
    table = Table(shards, layout)
    for shard in shards:
        setattr(shard, _TABLE, table)
    return table


def table_of(variable: Any) -> Table | None:
    """Returns the table of which a variable is a shard, or None."""
    table: Table | None = getattr(variable, _TABLE, None)
    return table


def is_own(variable: Any) -> bool:
    """Returns whether a variable holds this worker's rows of a table, so that other workers hold other values in it."""
    table = table_of(variable)
    return table is not None and table.layout.is_on_workers


def common(variables: Iterable[Any], optimizers: Iterable[keras.optimizers.Optimizer]) -> list[Any]:
    """Returns the variables of a model and its optimizers that all workers hold: without workers' rows of tables, pieces, and slots of them."""
    variables = list(variables)
    joined = with_tables(variables, optimizers)
    own = {
        id(shard) for each in joined if isinstance(each, Table) and each.layout.is_on_workers for shard in each.shards
    }
    return [variable for variable in variables if id(variable) not in own and not laid_out.is_laid_out(variable)]


def with_tables(variables: Iterable[Any], optimizers: Iterable[keras.optimizers.Optimizer]) -> Iterator[Any]:
    """Yields variables of a model and its optimizers in their order, but each table and slot of a table once, in the place of its first shard."""
    variables = list(variables)
    tables = {id(table): table for table in map(table_of, variables) if table is not None}
    found = [*tables.values()]
    for optimizer in optimizers:
        found += _slots(optimizer)
    table_of_shard = {id(shard): table for table in found for shard in table.shards}
    for variable in variables:
        table = table_of_shard.get(id(variable))
        if table is None:
            yield variable
        elif table.shards[0] is variable:
            yield table


def _slots(optimizer: keras.optimizers.Optimizer) -> Iterator[Table]:
    """Yields an optimizer's slots of tables."""
    for (layout, _), shards in _slot_shards(optimizer).items():
        yield Table(shards, layout)


def _slot_shards(optimizer: keras.optimizers.Optimizer) -> dict[tuple[Layout, str], list[keras.Variable]]:
    """Returns the variables of each slot of a table, by the table's layout and the kind of the slot."""
    held: dict[tuple[Layout, str], list[keras.Variable]] = {}
    for variable, kind, slot in keras_internals.slots(optimizer):
        table = table_of(variable)
        if table is not None:
            held.setdefault((table.layout, kind), []).append(slot)
    return held


def _save_optimizer(optimizer: keras.optimizers.Optimizer, store: Any) -> None:
    """Replaces Keras' method that writes an optimizer's variables."""
    for number, variable in enumerate(with_tables(optimizer.variables, [optimizer])):
        if isinstance(variable, Table):
            variable.save(store, str(number))
        else:
            store[str(number)] = variable.numpy()


def _load_optimizer(optimizer: keras.optimizers.Optimizer, store: Any) -> None:
    """Replaces Keras' method that reads an optimizer's variables."""
    variables = list(with_tables(optimizer.variables, [optimizer]))
    if len(variables) != len(store.keys()):
        # Keras' own method logs why it skips them.
        return _keras_load(types.SimpleNamespace(name=optimizer.name, variables=variables), store)
    for number, variable in enumerate(variables):
        if isinstance(variable, Table):
            variable.load(store, str(number))
        else:
            variable.assign(store[str(number)])
    return None


def _is_large(model: keras.Model) -> bool:
    tables = with_tables(model.variables, [])
    return any(isinstance(table, Table) and table.is_large for table in tables)


keras_files.through_disk(_is_large)
# Keras notifies no layer of an optimizer, nor an optimizer of a file that is read.
_keras_load = keras.optimizers.Optimizer.load_own_variables
keras.optimizers.Optimizer.save_own_variables = _save_optimizer
keras.optimizers.Optimizer.load_own_variables = _load_optimizer
