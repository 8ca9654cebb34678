"""Leaves out updates whose gradients are not finite, for the policies `stop` and `skip`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.gradients import gradient_lists


class FiniteUpdates:
    """Makes those updates whose reduced gradients are finite, and counts the others.

    All replicas decide alike, as they decide on the sum over all of them; so the update may hold collectives.

    Args:
        strategy: The strategy of the model.

    Attributes:
        skipped: How many updates this process has left out.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        with strategy.scope(), tf.init_scope():
            self.skipped = tf.Variable(
                0, trainable=False, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )

    def make(
        self,
        strategy: tf.distribute.Strategy,
        update: Callable[[], None],
        grads: Sequence[Any],
        finite: tf.Tensor | None = None,
    ) -> None:
        """Makes an update if its gradients are finite. In cross-replica context.

        Args:
            strategy: The strategy.
            update: Makes it on all replicas.
            grads: The reduced gradients, a value per replica for each.
            finite: Whether they are finite, if that is known.
        """
        local = strategy.experimental_local_results
        if finite is None:
            finite = tf.math.is_finite(gradient_lists.nan_unless_finite([local(grad)[0] for grad in grads]))

        def skip() -> None:
            for each in local(self.skipped):
                each.assign_add(1)

        tf.cond(finite, update, skip)
