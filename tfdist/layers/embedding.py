"""An embedding whose table is split by rows into shards, for tables that no single host holds."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.tf_strategies import each_worker_draws
from tfdist.config import relations
from tfdist.errors import ConfigError, format_value
from tfdist.layers import worker_rows
from tfdist.layers.row_initializer import RowInitializer
from tfdist.layers.table import MIN_ROWS, Table, local_copy, make_table
from tfdist.sharding.split import split_rows
from tfdist.strategy import as_ours

Ids = Any  # a tensor, a RaggedTensor or a SparseTensor of integers
_COMBINERS = (None, "sum", "mean", "sqrtn")
_MOST = 2**62  # TensorFlow counts in 64 bits


@keras.saving.register_keras_serializable(package="tfdist")
class Embedding(keras.layers.Layer):
    """Turns ids into rows of a table that is split into shards: row `i` is in shard `i % shards`.

    Each shard is a variable. Under `parameter_server` the shards lie on different servers, and under `multi_worker_mirrored` on different
    workers; a step reads and updates only the rows of its ids.
    A saved model holds one table, which `keras.layers.Embedding` loads, too; a backup continues with any number of shards.
    An id outside of the table is an error.

    Args:
        input_dim: The number of rows.
        output_dim: The number of columns.
        shards: The number of shards; `"auto"` is the number of servers under `parameter_server`, the number of workers under
            `multi_worker_mirrored` if there are at least 65,536 rows, and 1 elsewhere. If it is the number of workers, each holds one
            shard; any other number of shards is on every worker.
        combiner: How the rows of one example are combined: `"sum"`, `"mean"` or `"sqrtn"` (the sum divided by the root of the
            number of ids, or of the sum of squared weights). None returns a row for each id.
        embeddings_initializer: `"uniform"`, `"normal"`, `"zeros"`, `"ones"`, or a `RandomUniform`, `RandomNormal`, `TruncatedNormal` or
            `Constant`. The first value of a row depends on the seed and the row alone.
        embeddings_regularizer: A regularizer that is a sum over elements, such as L2.
        embeddings_constraint: A constraint. With several shards `NonNeg`, or one with `axis=1`.
        mask_zero: Whether id 0 is padding: without a combiner the output has a mask, with one padding does not count.
        seed: The seed of the initial values; by default that of the initializer.
        weights: The initial table, `[input_dim, output_dim]`, in place of the initializer's.
        **kwargs: Arguments of `keras.layers.Layer`, such as `name` and `dtype`.

    Input shape:
        Integers `[..., ids]`: a tensor, a RaggedTensor, or with a combiner a SparseTensor `[batch, ids]`. The second argument of a call
        gives a weight to each id, in the same form.

    Output shape:
        `[..., ids, output_dim]`, and with a combiner `[..., output_dim]`. The combination of no ids is 0.

    Raises:
        ConfigError: An argument is out of range, or ids are not integers.

    Examples:
        >>> import numpy as np, tfdist
        >>> layer = tfdist.layers.Embedding(1000, 4, shards=2, combiner="mean")
        >>> layer(np.array([[3, 999], [5, 5]])).shape
        TensorShape([2, 4])
    """

    built: bool
    table: Table

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        shards: int | Literal["auto"] = "auto",
        combiner: Literal["sum", "mean", "sqrtn"] | None = None,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        seed: int | None = None,
        weights: np.ndarray | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        _check_positive(input_dim=input_dim, output_dim=output_dim)
        if shards != "auto":
            _check_positive(shards=shards)
            if shards > input_dim:
                raise ConfigError(f"shards must be at most input_dim, {input_dim}. Received: {shards}.")
        if combiner not in _COMBINERS:
            names = ", ".join(map(repr, _COMBINERS))
            raise ConfigError(f"combiner must be one of {names}. Received: {format_value(combiner)}.")
        if not keras.backend.is_float_dtype(self.variable_dtype):
            raise ConfigError(
                f"dtype must be one of real numbers, such as 'float32'. Received: {self.variable_dtype!r}."
            )
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.shards = shards
        self.combiner = combiner
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.mask_zero = mask_zero
        self.seed = seed
        self.supports_masking = mask_zero
        # XLA would have to know how many ids each shard has. Servers, by whose number "auto" splits, do without XLA.
        self.supports_jit = shards in (1, "auto") and not self._is_on_workers()
        self.autocast = False  # a cast would read the whole table
        self._row_initializer = RowInitializer(self.embeddings_initializer, seed, self.name)
        if weights is not None:
            self.build()
            self.table.assign(np.asarray(weights))

    def build(self, input_shape: Any = None) -> None:
        """Creates the shards."""
        if self.built:
            return
        count = self._number_of_shards()
        self._check_shards(count)
        held: Sequence[int] = range(count)
        self._check_memory(count)
        drawn: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._is_on_workers():
            strategy = tf.distribute.get_strategy()
            held = [strategy.local_replicas[0] // len(strategy.extended.worker_devices)]
            drawn = each_worker_draws(strategy)
        variables = []
        with drawn:
            for number, shard in enumerate(held):
                rows = len(range(shard, self.input_dim, count))
                if len(held) < count:  # all workers create variables of one shape
                    rows = -(-self.input_dim // count)
                variable = self.add_weight(
                    name=f"embeddings_{number}",
                    shape=(rows, self.output_dim),
                    initializer=functools.partial(self._row_initializer.draw, shard, count),
                    regularizer=self.embeddings_regularizer,
                    constraint=self.embeddings_constraint,
                )
                variables.append(variable)
        self.table = make_table(variables, split_rows((self.input_dim, self.output_dim), count), held)
        self.built = True

    def _is_on_workers(self) -> bool:
        """Returns whether each worker holds some rows: that of `i % workers` holds row `i`."""
        strategy = as_ours(tf.distribute.get_strategy())
        if not strategy or not strategy.traits.several_processes or strategy.num_workers == 1:
            return False
        if self.shards == "auto":
            return self.input_dim >= MIN_ROWS
        return self.shards == strategy.num_workers

    def _number_of_shards(self) -> int:
        strategy = as_ours(tf.distribute.get_strategy())
        if isinstance(self.shards, int):
            return self.shards
        if strategy and self._is_on_workers():
            return strategy.num_workers
        if strategy and strategy.cluster and strategy.traits.asynchronous:
            return min(self.input_dim, len(strategy.cluster.jobs["ps"]))
        return 1

    def _check_memory(self, count: int) -> None:
        """Raises ConfigError if the rows that this host holds need more than its memory: to draw them would take hours before it fails."""
        strategy = as_ours(tf.distribute.get_strategy())
        if strategy and strategy.traits.asynchronous:  # servers hold the rows
            return
        rows = self.input_dim
        if self._is_on_workers():
            rows = -(-rows // count)
        needed = rows * self.output_dim * tf.as_dtype(self.variable_dtype).size
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory:
            raise ConfigError(
                f"{self.name} needs {needed / 1e9:,.0f} GB for {rows} rows of {self.output_dim} columns, and this host has {memory / 1e9:,.0f} GB: "
                "use fewer rows or columns, or more workers."
            )

    def _check_shards(self, count: int) -> None:
        """Raises ConfigError if a number of shards and other options exclude each other."""
        if count == 1:
            return
        constraint = self.embeddings_constraint
        by_row = isinstance(constraint, keras.constraints.NonNeg) or getattr(constraint, "axis", None) in (1, -1)
        if constraint and not by_row:
            raise ConfigError(
                f"embeddings_constraint of {self.name} must treat each row separately, because {count} variables hold the rows: use NonNeg, "
                f"axis=1, or shards=1. Received: {type(constraint).__name__}."
            )
        strategy = as_ours(tf.distribute.get_strategy())
        asked = {"sharded_table": f"{self.name} with {count} shards"}
        if strategy:
            asked |= strategy.config.asked()
            if strategy.mesh is not None:
                asked["mesh"] = ""
        relations.check(asked, "sharded_table")
        if self.embeddings_regularizer and self._is_on_workers():
            relations.check({"worker_table": f"{self.name} with rows on the workers", "regularizer": ""})

    def call(self, inputs: Ids, weights: Any = None) -> Any:
        """Returns the rows of ids, combined if there is a combiner."""
        self._check(inputs, weights)
        ids = _without_gaps(inputs)
        flat_ids = _flat(ids)
        rows = self._lookup(flat_ids)
        if self.combiner is None:
            return _like(ids, tf.cast(rows, self.compute_dtype))
        flat_weights = tf.ones_like(flat_ids, rows.dtype)
        if weights is not None:
            flat_weights = tf.cast(_flat(_without_gaps(weights)), rows.dtype)
        if self.mask_zero:
            flat_weights *= tf.cast(flat_ids != 0, rows.dtype)
        axis = ids.shape.rank - 1
        combined = tf.reduce_sum(_like(ids, rows * flat_weights[..., None]), axis)
        if self.combiner == "mean":
            divisor = tf.reduce_sum(_like(ids, flat_weights), axis)
            combined = tf.math.divide_no_nan(combined, divisor[..., None])
        elif self.combiner == "sqrtn":
            divisor = tf.sqrt(tf.reduce_sum(_like(ids, flat_weights**2), axis))
            combined = tf.math.divide_no_nan(combined, divisor[..., None])
        return tf.cast(combined, self.compute_dtype)

    def _lookup(self, ids: tf.Tensor) -> tf.Tensor:
        if ids.dtype != tf.int32 or self.input_dim > tf.int32.max:
            ids = tf.cast(ids, tf.int64)
        # A GPU would return zeros for a row that is not there, and the shards another row.
        in_range = tf.reduce_all((ids >= 0) & (ids < self.input_dim))
        message = f"ids of {self.name} must be 0 to {self.input_dim - 1} (input_dim={self.input_dim}). Received:"
        check = tf.debugging.Assert(in_range, [message, tf.reduce_min(ids), "to", tf.reduce_max(ids)])
        if check is not None:  # a graph
            with tf.control_dependencies([check]):
                ids = tf.identity(ids)
        shards = [local_copy(shard) for shard in self.table.shards]
        count = len(self.table.split.indices)
        if count == 1:
            return tf.gather(shards[0], ids)
        flat = tf.reshape(ids, [-1])
        if self.table.is_divided:
            rows = worker_rows.look_up(self.name, shards[0], flat, count)
        else:
            rows = _rows_of_shards(shards, flat)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [self.output_dim]], 0))
        rows.set_shape([*ids.shape, self.output_dim])
        return rows

    def _check(self, ids: Any, weights: Any) -> None:
        dtype = keras.backend.standardize_dtype(ids.dtype)
        if "int" not in dtype:
            raise ConfigError(
                f"ids of {self.name} must be integers: cast them, and declare keras.Input(..., dtype='int32'). Received: {dtype}."
            )
        if self.combiner is None and (weights is not None or getattr(ids, "sparse", isinstance(ids, tf.SparseTensor))):
            raise ConfigError(
                f"{self.name} combines no rows, so it takes neither weights nor sparse ids: use combiner='sum', 'mean' or 'sqrtn'."
            )
        if self.combiner and not len(ids.shape):
            raise ConfigError(
                f"ids of {self.name} must have one dimension or more, which combiner={self.combiner!r} combines."
            )
        if weights is not None and not tf.TensorShape(weights.shape).is_compatible_with(ids.shape):
            raise ConfigError(
                f"weights of {self.name} must have the shape of the ids, {tuple(ids.shape)}. Received: {tuple(weights.shape)}."
            )

    def compute_mask(self, inputs: Ids, previous_mask: Any = None) -> Any:
        """Returns where ids are not padding, with `mask_zero` and without a combiner."""
        if not self.mask_zero or self.combiner is not None:
            return None
        return keras.ops.not_equal(inputs, 0)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> keras.KerasTensor:
        """Returns the shape and dtype of the rows."""
        self._check(inputs, weights)
        shape = inputs.shape if self.combiner is None else inputs.shape[:-1]
        is_ragged = self.combiner is None and getattr(inputs, "ragged", False)
        return keras.KerasTensor((*shape, self.output_dim), dtype=self.compute_dtype, ragged=is_ragged)

    def save_own_variables(self, store: Any) -> None:
        """Writes one table, as `keras.layers.Embedding` does."""
        if self.built:
            self.table.save(store, "0")

    def load_own_variables(self, store: Any) -> None:
        """Reads one table, which any number of shards or `keras.layers.Embedding` has written."""
        if not self.built or list(store.keys()) != ["0"]:
            raise ValueError(
                f"Layer {self.name!r} must be built, and the file must hold one table for it. Received: {len(store.keys())} variables."
            )
        self.table.load(store, "0")

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal layer, without its values."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "shards": self.shards,
            "combiner": self.combiner,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "mask_zero": self.mask_zero,
            "seed": self.seed,
        }


def _check_positive(**arguments: Any) -> None:
    for name, value in arguments.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} must be an int of at least 1. Received: {format_value(value)}.")
        if value > _MOST:
            raise ConfigError(f"{name} must be at most {_MOST}. Received: {format_value(value)}.")


def _without_gaps(value: Any) -> Any:
    """Returns a SparseTensor `[batch, ids]` as a RaggedTensor; other tensors as they are."""
    if not isinstance(value, tf.SparseTensor):
        return value
    return tf.RaggedTensor.from_value_rowids(value.values, value.indices[:, 0], value.dense_shape[0])


def _flat(value: Any) -> tf.Tensor:
    """Returns the values of a RaggedTensor, one after the other; a tensor as it is."""
    if isinstance(value, tf.RaggedTensor):
        return value.flat_values
    return tf.convert_to_tensor(value)


def _like(ids: Any, values: tf.Tensor) -> Any:
    """Returns values in the rows of ids: the inverse of `_flat`."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(values)
    return values


def _rows_of_shards(shards: Sequence[tf.Variable], ids: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a vector of ids from all shards."""
    count = len(shards)
    shard_of_id = tf.cast(ids % count, tf.int32)
    local_rows = tf.dynamic_partition(ids // count, shard_of_id, count)
    places = tf.dynamic_partition(tf.range(tf.size(ids)), shard_of_id, count)
    gathered = [tf.gather(shard, own) for shard, own in zip(shards, local_rows, strict=True)]
    return tf.dynamic_stitch(places, gathered)
