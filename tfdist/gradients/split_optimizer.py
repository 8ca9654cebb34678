"""`shard_optimizer`: the slots of optimizers are split over the processes."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Variables
from tfdist.compat import keras_internals, optimizer_search, piece_optimizer
from tfdist.compat.split_value import SplitSlot
from tfdist.feature import Feature
from tfdist.gradients.optimizer import create_compression_state, update_of
from tfdist.gradients.sharded_update import ShardedUpdate
from tfdist.gradients.way import Batch, Rest, Stage
from tfdist.strategy import Strategy


class SplitOptimizer(Feature):
    """Optimizers of which each process holds a part of the slots."""

    after = ("gradient_sums", "row_updates")
    splits_state = True

    @classmethod
    def asks(cls, strategy: Strategy) -> bool:
        return strategy.config.shard_optimizer and strategy.num_replicas_in_sync > 1

    def attach(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> None:
        shard(optimizer, self.strategy)

    def summary(self, model: keras.Model, workers: int) -> dict[str, Any]:
        return {"optimizer_bytes": [optimizer_bytes(model, worker) for worker in range(workers)]}


class Parts:
    """The stages by which each process sums and updates its part of the variables."""

    def __init__(self, sharded: ShardedUpdate):
        self._sharded = sharded
        self.move_averages = sharded.move_averages

    @property
    def scatters(self) -> bool:
        """True if a process needs its part of the sum alone: no norm of whole gradients."""
        return not self._sharded.clips_by_norm

    def scatter(self) -> Stage:
        """Returns the stage of the sum."""
        return _Scatter(self._sharded)

    def update(self, are_parts: bool) -> Stage:
        """Returns the stage of the update, of sums or of parts of them."""
        return _UpdateParts(self._sharded, are_parts)


class _Scatter(Stage):
    across = True

    def __init__(self, sharded: ShardedUpdate):
        self._sharded = sharded

    def __call__(self, batch: Batch, rest: Rest) -> None:
        rest(batch.of(self._sharded.reduce_scatter(batch.grads, batch.variables)))


class _UpdateParts(Stage):
    across = True

    def __init__(self, sharded: ShardedUpdate, are_parts: bool):
        self._sharded = sharded
        self._are_parts = are_parts

    def __call__(self, batch: Batch, rest: Rest) -> None:
        self._sharded.update(batch.grads, batch.variables, self._are_parts)


def shard(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Splits the slots of a distributed optimizer over the processes of a strategy, in place."""
    leaf = getattr(optimizer, "inner_optimizer", optimizer)
    update = update_of(leaf)
    if update is None or update.parts:
        return
    sharded = ShardedUpdate(leaf, strategy)
    update.parts = Parts(sharded)

    def build(variables: Variables) -> None:
        sharded.build(variables)
        create_compression_state(leaf, update, variables)

    leaf.build = build
    keras_internals.replace_overwrite(leaf, sharded.overwrite)
    if leaf.built:
        sharded.split()


def optimizer_bytes(model: keras.Model, process: int) -> int:
    """Returns the bytes of the variables of a model's optimizers on a process, on each of its devices; split slots are there once."""
    total = 0
    for optimizer in optimizer_search.optimizers(model):
        for variable in piece_optimizer.state_variables(optimizer):
            elements = tf.TensorShape(variable.shape).num_elements()
            if isinstance(variable, SplitSlot):
                elements = variable.split.size(process)
            total += elements * tf.as_dtype(variable.dtype).size
    return total
