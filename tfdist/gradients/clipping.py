"""The clipping of gradients: on each replica before the sum, or of the sum, by norms of values that ranks hold in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Structure, Variables
from tfdist.collectives.communicator import communicator_for
from tfdist.compat import keras_internals
from tfdist.compat.tf_internals import regroup
from tfdist.gradients import gradient_lists
from tfdist.gradients.way import Batch, Rest, Stage
from tfdist.layers.table import is_own, table_of
from tfdist.strategy import as_ours


class ClipOnReplica(Stage):
    """Keras' order: each replica clips its own gradient, before the sum, by the optimizer's own method.

    Args:
        optimizer: The optimizer, which then clips no more.
        keeps_infinity: Whether a gradient that is not finite must stay so, for a `LossScaleOptimizer`.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, keeps_infinity: bool):
        self._clip = keras_internals.clip_method(optimizer)
        self._keeps_infinity = keeps_infinity
        keras_internals.replace_clip(optimizer, list)

    def __call__(self, batch: Batch, rest: Rest, scale: tf.Tensor | float = 1.0) -> None:
        """Passes clipped gradients on. `scale` is the loss scale that they contain."""
        present = batch.present.grads
        clipped = gradient_lists.scale(self._clip(gradient_lists.scale(present, 1 / scale)), scale)
        if self._keeps_infinity:
            clipped = gradient_lists.add_scalar(clipped, gradient_lists.nan_unless_finite(present))
        remaining = iter(clipped)
        rest(batch.of([None if grad is None else next(remaining) for grad in batch.grads]))
