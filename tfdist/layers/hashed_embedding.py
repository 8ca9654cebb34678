"""An embedding of ids that are not known beforehand: any integers of 64 bits, in a table of fixed capacity."""

from __future__ import annotations

from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.collectives import own_time
from tfdist.collectives.communicator import communicator_for
from tfdist.compat import keras_internals
from tfdist.compat.optimizer_search import optimizers
from tfdist.compat.tf_internals import num_replicas
from tfdist.config.strategy_traits import traits_of
from tfdist.errors import ConfigError, format_value
from tfdist.layers import worker_rows
from tfdist.layers.embedding import Embedding, Ids, check_positive, flat, without_gaps
from tfdist.layers.id_index import IdIndex
from tfdist.layers.table import slots_of
from tfdist.replicas import step_context
from tfdist.runtime.log import logger
from tfdist.strategy import as_ours


@keras.saving.register_keras_serializable(package="tfdist")
class HashedEmbedding(Embedding):
    """Turns any integers into rows of a table of fixed capacity, which ids enter while the model trains.

    A training step counts the ids of the whole batch. An id that was seen `min_count` times gets a row, in the same step; lower ids come
    first. All other ids share one row, "unknown", which trains, too. Evaluation and prediction count nothing.

    If the table is full, new ids stay unknown. Each backup that `save_freq` schedules removes ids until the table is 90 % full, if it is
    fuller. The next id of a removed id's row begins with a first value and optimizer slots of its own.

    Args:
        capacity: The number of ids that have a row.
        output_dim: The number of columns.
        min_count: How often an id is seen before it has a row. With 2 or more, up to `2 * capacity` ids are counted.
        evict_by: Which ids are removed: `"age"`, those that were not seen for the longest time, or `"count"`, those that were seen least
            often since they were first counted.
        **kwargs: Arguments of `tfdist.layers.Embedding`, without `input_dim` and `weights`. With `mask_zero`, id 0 is padding and has no row.

    Input shape:
        As of `tfdist.layers.Embedding`. The smallest integer of 64 bits always is unknown. Turn strings into integers first, such as by
        `tf.strings.to_hash_bucket_fast(strings, 2**62)`.

    Output shape:
        As of `tfdist.layers.Embedding`.

    Raises:
        ConfigError: An argument is out of range, ids are not integers, or the strategy is asynchronous.

    Examples:
        >>> import numpy as np, tfdist
        >>> layer = tfdist.layers.HashedEmbedding(1000, 4, combiner="mean")
        >>> layer(np.array([[3, 2**60], [-5, -5]]), training=True).shape
        TensorShape([2, 4])
    """

    def __init__(
        self,
        capacity: int,
        output_dim: int,
        min_count: int = 1,
        evict_by: Literal["age", "count"] = "age",
        **kwargs: Any,
    ):
        check_positive(capacity=capacity, min_count=min_count)
        if evict_by not in ("age", "count"):
            raise ConfigError(f"evict_by must be 'age' or 'count'. Received: {format_value(evict_by)}.")
        unsuited = sorted(kwargs.keys() & {"input_dim", "weights"})
        if unsuited:
            raise ConfigError(
                f"HashedEmbedding takes no {' and no '.join(unsuited)}, because ids get their rows in training; leave it out."
            )
        super().__init__(capacity + 1, output_dim, **kwargs)
        self.capacity = capacity
        self.min_count = min_count
        self.evict_by = evict_by
        self.supports_jit = False  # the number of new ids is known only when a step runs
        self._has_warned = False

    def build(self, input_shape: Any = None) -> None:
        """Creates the shards and the index of ids."""
        if self.built:
            return
        strategy = tf.distribute.get_strategy()
        if not traits_of(strategy).gathers or traits_of(strategy).asynchronous:
            raise ConfigError(
                f"{self.name} needs replicas that admit the same ids in the same order, which {type(strategy).__name__} does not have: use "
                "multi_worker_mirrored, mirrored or one_device, or tfdist.layers.Embedding of hashed ids."
            )
        ours = as_ours(strategy)
        if ours and ours.shard_optimizer:
            raise ConfigError(
                f"{self.name} resets optimizer slots by rows, which shard_optimizer=True does not support (yet): use shard_optimizer=False."
            )
        if ours and ours.sync_every:
            raise ConfigError(
                f"{self.name} admits ids at each step on all workers, which with sync_every train alone: leave sync_every out, or use "
                "tfdist.layers.Embedding."
            )
        super().build()
        self._index = IdIndex(self.capacity, self.min_count)
        self._index_variables = self._index.variables  # Keras finds lists of variables

    def call(self, inputs: Ids, weights: Any = None, training: bool = False) -> Any:
        """Returns the rows of ids, combined if there is a combiner. In training, ids may enter the table first."""
        self._check(inputs, weights)
        if training and self.trainable:
            self._count(flat(without_gaps(inputs)))
        return super().call(inputs, weights)

    def compute_output_spec(self, inputs: Any, weights: Any = None, training: bool = False) -> keras.KerasTensor:
        """Returns the shape and dtype of the rows."""
        return super().compute_output_spec(inputs, weights)

    def _lookup(self, ids: tf.Tensor) -> tf.Tensor:
        rows = self._index.find(tf.reshape(tf.cast(ids, tf.int64), [-1]))
        return super()._lookup(tf.ensure_shape(tf.reshape(rows, tf.shape(ids)), ids.shape))

    def _count(self, ids: tf.Tensor) -> None:
        """Counts the ids of all replicas, and admits some. A collective, within a replica's step."""
        step = step_context.current()
        context = tf.distribute.get_replica_context()
        replicas = num_replicas(tf.distribute.get_strategy())
        if keras_internals.in_symbolic_scope() or (replicas > 1 and step is not None and step.is_alone):
            return  # traced, and not run
        if replicas > 1:
            why = worker_rows.fault(step)
            if why:
                raise ConfigError(
                    f"{self.name} cannot learn the ids of all replicas: {why}, or use tfdist.layers.Embedding."
                )
        ids = tf.reshape(tf.cast(ids, tf.int64), [-1])
        if self.mask_zero:
            ids = tf.boolean_mask(ids, ids != 0)
        if step is not None and step.examples is not None:
            # A replica without examples runs one that does not count.
            ids = ids[: tf.where(step.examples > 0, tf.size(ids), 0)]
        ids, _, counts = tf.unique_with_counts(ids, tf.int64)
        number = tf.cast(step.number if step else 0, tf.int64)
        context.merge_call(self._admit, args=(ids, counts, number))
        if replicas > 1:
            context.strategy.decorrelate_random_numbers()  # this replica has waited for the others

    def _admit(self, strategy: tf.distribute.Strategy, ids: Structure, counts: Structure, number: Structure) -> None:
        """Admits ids of all replicas. In cross-replica context."""
        local = strategy.experimental_local_results
        pairs = zip(local(ids), local(counts), strict=True)
        slices = [tf.IndexedSlices(counts_of_one[:, None], ids_of_one) for ids_of_one, counts_of_one in pairs]
        batch = slices[0]
        if num_replicas(strategy) > 1:
            group = communicator_for(strategy)
            step = local(number)[0]
            batch = own_time.leave_out_wait(strategy, batch.indices, lambda: group.gather_rows(slices, step))[0]
        admitted = self._index.admit(batch.indices, batch.values[:, 0])
        values = self._row_initializer.draw_rows(admitted.ids, self.output_dim, self.table.dtype)
        self.table.set_rows(admitted.rows, values)
        ours = as_ours(strategy)
        if not ours or ours.local_replicas[0] == 0:
            tf.cond(admitted.is_full, lambda: tf.numpy_function(self._warn, [], []), tf.no_op)

    def _warn(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            f"{self.name} is full: new ids stay unknown until a backup removes ids. Raise capacity={self.capacity} or "
            f"min_count={self.min_count}, or make backups more often (save_freq)."
        )

    def evict(self, model: keras.Model) -> None:
        """Removes ids until the table is at most 90 % full, and resets their rows' slots in the model's optimizers. Outside of steps.

        Backups call it on all ranks. Call it in a custom loop that has none.
        """
        freed = tf.constant(self._index.evict(by_count=self.evict_by == "count"))
        if not len(freed):
            return
        for optimizer in optimizers(model):
            initial = keras_internals.initial_slots(optimizer, self.output_dim)
            for kind, slot in slots_of(self.table, optimizer):
                slot.set_rows(freed, tf.repeat(tf.cast(initial[kind], slot.dtype), len(freed), 0))

    def save_own_variables(self, store: Any) -> None:
        """Writes the table and the index of ids."""
        if not self.built:
            return
        self.table.save(store, "0")
        for number, variable in enumerate(self._index.variables, 1):
            store[str(number)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Reads the table and the index of ids."""
        self.table.load(store, "0")
        for number, variable in enumerate(self._index.variables, 1):
            variable.assign(np.asarray(store[str(number)]))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal layer, without its values."""
        config = super().get_config()
        del config["input_dim"]
        return {**config, "capacity": self.capacity, "min_count": self.min_count, "evict_by": self.evict_by}


def evict_ids(model: keras.Model) -> None:
    """Makes room in each `HashedEmbedding` of a model."""
    for layer in keras_internals.layers(model):
        if isinstance(layer, HashedEmbedding) and layer.built:
            layer.evict(model)
