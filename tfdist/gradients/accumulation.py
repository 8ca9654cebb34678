"""`gradient_accumulation_steps`: gradients are added up on each replica, and passed on at each n-th step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.compat import keras_internals
from tfdist.gradients import gradient_lists
from tfdist.gradients.conditions import cond_of
from tfdist.gradients.way import Batch, Rest, Stage
from tfdist.layers.table import is_own


class Accumulate(Stage):
    """Adds gradients to the optimizer's accumulators, and passes on their mean, each replica its part of it.

    Args:
        optimizer: The optimizer.
        sums_later: Whether a later stage sums over the replicas; else the gradients are summed already, or each worker trains alone.
        clip: Clips this replica's part, in Keras' order.
    """

    across = True

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        sums_later: bool,
        clip: Callable[[Sequence[Gradient]], Sequence[Gradient]],
    ):
        self._optimizer = optimizer
        self._sums_later = sums_later
        self._clip = clip

    def __call__(self, batch: Batch, rest: Rest) -> None:
        strategy = tf.distribute.get_strategy()
        call = strategy.extended.call_for_each_replica
        step = tf.convert_to_tensor(keras_internals.step_counter(self._optimizer).value) + 1
        of_batch = (batch.grads, batch.variables)
        cond_of(strategy)(
            step % self._optimizer.gradient_accumulation_steps == 0,
            lambda: rest(batch.of(call(self._parts, args=of_batch))),
            lambda: call(self._add, args=of_batch),
        )

    def _add(self, grads: Sequence[Gradient], variables: Variables) -> None:
        for accumulator, total, _ in self._totals(grads, variables):
            accumulator.assign(total)

    def _parts(self, grads: Sequence[Gradient], variables: Variables) -> list[tf.Tensor]:
        """Returns this replica's part of the mean over steps and replicas, and resets the accumulators.

        They stay reset even if the sum is not finite: a NaN in them would stay in all later updates.
        """
        steps = self._optimizer.gradient_accumulation_steps
        parts = self._clip([total / (steps * parts) for _, total, parts in self._totals(grads, variables)])
        # Like Keras, also reset the accumulators of variables without a gradient at this step.
        for accumulator in keras_internals.accumulators(self._optimizer):
            accumulator.value.assign(tf.zeros_like(accumulator.value))
        return list(parts)

    def _totals(self, grads: Sequence[Gradient], variables: Variables) -> Iterator[tuple[tf.Variable, tf.Tensor, int]]:
        """Yields for each gradient its accumulator, the new value of it, and the number of replicas whose values are summed later."""
        accumulators = keras_internals.accumulators(self._optimizer)
        for grad, variable in zip(gradient_lists.with_static_shapes(grads, variables), variables, strict=True):
            accumulator = accumulators[keras_internals.variable_index(self._optimizer, variable)].value
            replicas = 1
            if self._sums_later and not is_own(variable):
                # A replica's gradient is its share of a sum, but accumulators are averaged over the replicas, as statistics are. With
                # this factor their mean is the accumulator of one process.
                replicas = tf.distribute.get_strategy().num_replicas_in_sync
            yield accumulator, accumulator + tf.convert_to_tensor(grad) * replicas, replicas
