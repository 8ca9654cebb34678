"""The clipping of gradients: on each replica before the sum, or of the sum by norms of values that ranks hold in parts."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.compat import keras_internals, laid_out
from tfdist.gradients import gradient_lists
from tfdist.gradients.way import Batch, Rest, Stage
from tfdist.gradients.whole import norms_squared
from tfdist.layers.table import is_own, table_of


class ClipOnReplica:
    """Keras' order: each replica clips its own gradient, before the sum, by the optimizer's own method.

    Args:
        optimizer: The optimizer, which then clips no more.
        keeps_infinity: Whether a gradient that is not finite must stay so, for a `LossScaleOptimizer`.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, keeps_infinity: bool):
        self._clip = keras_internals.clip_method(optimizer)
        self._keeps_infinity = keeps_infinity
        keras_internals.replace_clip(optimizer, list)

    def clipped(self, grads: Sequence[Gradient], scale: tf.Tensor | float = 1.0) -> list[Gradient]:
        """Returns clipped gradients. `scale` is the loss scale that they contain."""
        present = [grad for grad in grads if grad is not None]
        clipped = gradient_lists.scale(self._clip(gradient_lists.scale(present, 1 / scale)), scale)
        if self._keeps_infinity:
            clipped = gradient_lists.add_scalar(clipped, gradient_lists.nan_unless_finite(present))
        remaining = iter(clipped)
        return [None if grad is None else next(remaining) for grad in grads]


class ClipByWholeNorms(Stage):
    """Clips reduced gradients by norms to which all ranks contribute that hold parts of a value. A collective then.

    Where each rank holds all values, the optimizer itself clips.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._optimizer = optimizer

    def __call__(self, batch: Batch, rest: Rest) -> None:
        optimizer, variables = self._optimizer, keras_internals.trainable_variables(self._optimizer)
        if not needs_whole_norms(optimizer, variables):
            return rest(batch)
        keras_internals.clip_unless(optimizer, lambda: needs_whole_norms(optimizer, variables))
        # Replicas have rows in common, whose squares must not be added before the rows are.
        grads = gradient_lists.deduplicate_rows(batch.grads)
        factors = _factors(optimizer, norms_squared(grads, batch.variables), batch.variables)
        clipped = [gradient_lists.scale([grad], factor)[0] for grad, factor in zip(grads, factors, strict=True)]
        return rest(batch.of(clipped))


def needs_whole_norms(optimizer: keras.optimizers.Optimizer, variables: Variables) -> bool:
    """Returns whether an optimizer of some variables clips by norms that this rank cannot compute from single variables."""
    if optimizer.clipnorm:  # of each table, whatever the number of its variables
        return any(
            laid_out.copies(variable) or ((table := table_of(variable)) is not None and len(table.split.indices) > 1)
            for variable in variables
        )
    return bool(optimizer.global_clipnorm) and any(is_own(each) or laid_out.copies(each) for each in variables)


def _factors(
    optimizer: keras.optimizers.Optimizer, squares: Sequence[tf.Tensor], variables: Variables
) -> list[tf.Tensor]:
    """Returns the number by which each gradient is multiplied, in Keras' formulas."""
    if optimizer.clipnorm:  # Keras ignores the other one
        tables: dict[int, list[tf.Tensor]] = {}  # the squares of each table, or of another variable
        keys = [id(table_of(variable) or variable) for variable in variables]
        for key, square in zip(keys, squares, strict=True):
            tables.setdefault(key, []).append(square)
        most = optimizer.clipnorm
        factors = {key: most / tf.maximum(tf.sqrt(tf.add_n(parts)), most) for key, parts in tables.items()}
        return [factors[key] for key in keys]
    norm = tf.sqrt(tf.add_n(list(squares)))
    most = optimizer.global_clipnorm
    # NaN if the norm is not finite.
    return [most * tf.minimum(1 / norm, 1 / most) + (norm - norm)] * len(squares)
