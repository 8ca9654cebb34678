"""A table whose rows several variables hold, and an optimizer's slots of it. Files hold each as the one array that Keras would write."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_files, keras_internals
from tfdist.compat.split_value import SplitValue, copies, is_split
from tfdist.sharding.split import Split, view

MIN_ROWS = 65_536  # a smaller table is updated as a whole, and held by each worker: as fast
_TABLE = "_tfdist_table"  # the attribute of a variable that is a shard


class Table(SplitValue):
    """A table, or an optimizer's slot of one.

    Attributes:
        shards: The variables of this process: all, or that of this worker. Workers have variables of equal shape, so that the last row of
            some is unused.
        shape: The shape of the whole table.
    """

    def __init__(self, shards: Sequence[keras.Variable], split: Split, held: Sequence[int]):
        self.shards = shards
        self.split = split
        self.held = held
        self.shape = split.shape
        self.dtype = tf.as_dtype(shards[0].dtype)
        self.path = str(shards[0].path)

    def variables(self) -> Sequence[tf.Variable]:
        return list(map(keras_internals.raw_value, self.shards))

    def assign(self, values: Any) -> None:
        """Sets all rows to those of an array, or of an HDF5 dataset."""
        if tuple(values.shape) != self.shape:
            raise ValueError(
                f"The table {self.path} must have shape {self.shape}: build the layer with the file's input_dim and output_dim. "
                f"Received: {tuple(values.shape)}."
            )
        for rows in self.chunks():
            chunk = np.asarray(values[rows.start : rows.stop])
            for shard, variable in zip(self.held, self.variables(), strict=True):
                overlap = self.split.overlap(shard, rows)
                if overlap is not None:
                    index, local = overlap
                    update = tf.IndexedSlices(
                        tf.cast(view(chunk, index), self.dtype), tf.range(local.start, local.stop)
                    )
                    _scatter(variable, update)

    def _read(self, variable: tf.Variable, local: slice) -> np.ndarray:
        # A server sends these rows only.
        return tf.gather(variable, tf.range(local.start, local.stop)).numpy()


def _scatter(variable: tf.Variable, update: tf.IndexedSlices) -> None:
    for component in copies(variable):
        with tf.device(component.device):
            component.scatter_update(update)


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


def make_table(shards: Sequence[keras.Variable], split: Split, held: Sequence[int]) -> Table:
    """Returns the table of a layer's variables, and marks them as its shards."""
    table = Table(shards, split, held)
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
    return table is not None and table.is_divided


def common(variables: Iterable[Any], optimizers: Iterable[keras.optimizers.Optimizer]) -> list[Any]:
    """Returns the variables of a model and its optimizers that all workers hold: without workers' rows of tables, pieces, and slots of them."""
    variables = list(variables)
    joined = with_tables(variables, optimizers)
    own = {id(shard) for each in joined if isinstance(each, Table) and each.is_divided for shard in each.shards}
    return [variable for variable in variables if id(variable) not in own and not is_split(variable)]


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
    slots: dict[tuple[Table, str], list[keras.Variable]] = {}
    for variable, kind, slot in keras_internals.slots(optimizer):
        table = table_of(variable)
        if table is not None:
            slots.setdefault((table, kind), []).append(slot)
    for (table, _), shards in slots.items():
        yield Table(shards, table.split, table.held)


def _whole_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns an optimizer's variables in Keras' order, of which each stands for one array in files."""
    return list(with_tables(optimizer.variables, [optimizer]))


def _save_optimizer(optimizer: keras.optimizers.Optimizer, store: Any) -> None:
    """Replaces Keras' method that writes an optimizer's variables."""
    for number, variable in enumerate(_whole_variables(optimizer)):
        if is_split(variable):
            variable.save(store, str(number))
        else:
            store[str(number)] = variable.numpy()


def _load_optimizer(optimizer: keras.optimizers.Optimizer, store: Any) -> None:
    """Replaces Keras' method that reads an optimizer's variables."""
    variables = _whole_variables(optimizer)
    if len(variables) != len(store.keys()):
        # Keras' own method logs why it skips them.
        return _keras_load(types.SimpleNamespace(name=optimizer.name, variables=variables), store)
    for number, variable in enumerate(variables):
        if is_split(variable):
            variable.load(store, str(number))
        else:
            variable.assign(store[str(number)])
    return None


def _is_large(model: keras.Model) -> bool:
    return any(is_split(value) and value.is_large for value in with_tables(model.variables, []))


keras_files.through_disk(_is_large)
# Keras notifies no layer of an optimizer, nor an optimizer of a file that is read.
_keras_load = keras.optimizers.Optimizer.load_own_variables
keras.optimizers.Optimizer.save_own_variables = _save_optimizer
keras.optimizers.Optimizer.load_own_variables = _load_optimizer
