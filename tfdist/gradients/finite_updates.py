"""Updates that are skipped because a gradient is not finite."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.compat import optimizer_search
from tfdist.gradients.conditions import cond_of
from tfdist.gradients.optimizer import update_of
from tfdist.gradients.way import Batch, Rest, Stage


class FiniteUpdates(Stage):
    """Skips updates whose gradients are not finite, and counts them, for the NaN policies `stop` and `skip`.

    Attributes:
        skipped: The number of updates that this process has skipped.
    """

    across = True

    def __init__(self, strategy: tf.distribute.Strategy):
        with strategy.scope(), tf.init_scope():
            self.skipped = tf.Variable(
                0, trainable=False, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )

    def __call__(self, batch: Batch, rest: Rest) -> None:
        strategy = tf.distribute.get_strategy()

        def skip() -> None:
            for count in strategy.experimental_local_results(self.skipped):
                count.assign_add(1)

        cond_of(strategy)(batch.finite, lambda: rest(batch), skip)


def skip_non_finite(optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Makes a distributed optimizer skip updates with non-finite gradients; a `LossScaleOptimizer` does so itself."""
    update = update_of(optimizer)
    if update is not None and not update.scaled and update.finite is None:
        update.finite = FiniteUpdates(strategy)


def skipped_updates(model: keras.Model) -> list[tf.Variable]:
    """Returns the counts of updates that this process has skipped, one for each optimizer with `skip_non_finite`."""
    updates = map(update_of, optimizer_search.optimizers(model))
    return [update.finite.skipped for update in updates if update is not None and update.finite]
