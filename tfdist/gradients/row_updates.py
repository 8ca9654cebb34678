"""The update of a large table, such as an embedding's, by the rows that a gradient has.

Keras' optimizers compute with the whole table in each step, so that a step takes longer the larger the table is. Here Keras' own formula
runs on the rows of the gradient and on the same rows of the optimizer's slots (`compat/piece_optimizer.py`).

An exact optimizer leaves a row without a gradient, and its slots, as they are, so the result is Keras'. Any other optimizer that updates
each element independently may be used as LazyAdam uses Adam: slots decay, and weights move, only when their row has a gradient.

A gradient is sparse here only if no accumulator has made it dense. The pieces of `shard_optimizer` are updated elsewhere (`sharded_update.py`).
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Gradient
from tfdist.compat import keras_internals, model_features, piece_optimizer
from tfdist.config import relations
from tfdist.feature import Feature
from tfdist.layers import row_lookups
from tfdist.layers.table import MIN_ROWS, table_of
from tfdist.replicas.random_seeds import UpdateSeeds


class RowUpdates(Feature):
    """Large tables whose steps read, and update, the rows of a batch alone."""

    after = ("gradient_sums", "model_parallel")

    def attach_model(self, model: keras.Model, engine: Any) -> None:
        if self.strategy.mesh is None:
            row_lookups.look_up_rows(model)

    def attach(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> None:
        install(optimizer, self.strategy.config.row_updates)


class RowUpdate:
    """The replacement of an optimizer's `update_step`.

    Attributes:
        mode: `"auto"`, `"lazy"` or `"off"`, as `StrategyConfig.row_updates`.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, mode: str):
        self._optimizer = optimizer
        self._update_whole, _ = keras_internals.variable_update_methods(optimizer)
        self.mode = mode
        self._seeds = UpdateSeeds(optimizer)

    def __call__(self, gradient: Gradient, variable: tf.Variable, learning_rate: keras.Variable | float) -> None:
        with self._seeds.equal(variable):
            if self._is_by_rows(gradient, variable):
                piece_optimizer.update_rows(self._optimizer, gradient, variable, learning_rate)
            else:
                self._update_whole(gradient, variable, learning_rate)

    def _is_by_rows(self, gradient: Gradient, variable: tf.Variable) -> bool:
        if self.mode == "off" or not isinstance(gradient, tf.IndexedSlices):
            return False
        table = table_of(piece_optimizer.variable_of(self._optimizer, variable)) or variable
        if table.shape[0] < MIN_ROWS:
            return False
        asked = {
            "lazy_rows": f"row_updates='lazy' of {variable.name} with {variable.shape[0]} rows",
            **model_features.of_optimizer(self._optimizer),
        }
        if keras_internals.decays_weight(self._optimizer, variable):
            asked["weight_decay"] = f"weight_decay of the optimizer {type(self._optimizer).__name__}"
        if self.mode == "auto":
            return _is_exact(self._optimizer) and not any(relations.faults(asked, "lazy_rows"))
        relations.check(asked, "lazy_rows")
        return True


def install(optimizer: keras.optimizers.Optimizer, mode: str) -> None:
    """Makes an optimizer update large tables by rows, in place. Its gradients must have each row once."""
    leaf = getattr(optimizer, "inner_optimizer", optimizer)
    update, decay = keras_internals.variable_update_methods(leaf)
    if isinstance(update, RowUpdate):
        update.mode = mode
    else:
        keras_internals.replace_variable_update(leaf, RowUpdate(leaf, mode), decay)


def _is_exact(optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer leaves the elements, and their slots, whose gradient is 0 as they are."""
    if type(optimizer) is keras.optimizers.SGD:
        return not optimizer.momentum
    return type(optimizer) is keras.optimizers.Adagrad
