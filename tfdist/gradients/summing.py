"""The stages that sum gradients over all replicas. This worker's rows of tables are summed already, and pass them as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.collectives.own_time import own_time_of
from tfdist.compat import keras_internals
from tfdist.config.strategy_traits import traits_of
from tfdist.errors import ConfigError
from tfdist.gradients import gradient_lists, worker_tables
from tfdist.gradients.reduction import Reduction, bucketed_all_reduce, gather_rows_in_process, uses_bucketed_all_reduce
from tfdist.gradients.way import Batch, Rest, Stage
from tfdist.replicas.step_context import StepContext


class Sum(Stage):
    """The plain sum, by TensorFlow or in buckets.

    Args:
        number: Returns the number of the update.
    """

    def __init__(self, number: Callable[[], tf.Tensor]):
        self._number = number

    def __call__(self, batch: Batch, rest: Rest) -> None:
        context = tf.distribute.get_replica_context()
        summed = functools.partial(sum_over_replicas, context, variables=batch.variables, step=self._number())
        rest(batch.of(worker_tables.map_others(summed, batch.grads, batch.variables)))


class CompressedSum(Stage):
    """The sum through a compressor, which also says whether the gradients that it has summed are finite.

    Args:
        reduction: The sum, with the compressor's state.
        optimizer: The optimizer, which no other one wraps.
        scale: Returns the loss scale that the gradients contain, as residuals are kept unscaled; None without one.
    """

    across = True

    def __init__(
        self,
        reduction: Reduction,
        optimizer: keras.optimizers.Optimizer,
        scale: Callable[[], tf.Tensor | None] = lambda: None,
    ):
        self._reduction = reduction
        self._optimizer = optimizer
        self._scale = scale

    def __call__(self, batch: Batch, rest: Rest) -> None:
        totals = list(batch.grads)
        finite = tf.constant(True)
        shared = worker_tables.shared_indices(batch.variables)
        if shared:
            numbers = [self._index(batch.variables[index]) for index in shared]
            local = [batch.grads[index] for index in shared]
            sums, finite = self._reduction(local, numbers, self._optimizer.iterations, self._scale())
            for index, total in zip(shared, sums, strict=True):
                totals[index] = total
        rest(Batch(totals, batch.variables, finite))

    def _index(self, variable: keras.Variable) -> int:
        try:
            return keras_internals.variable_index(self._optimizer, variable)
        except KeyError:
            raise ConfigError(
                f"The optimizer {type(self._optimizer).__name__} was built without the variable "
                f"{getattr(variable, 'path', variable.name)}, which was perhaps frozen then: compile the model with a new "
                "optimizer."
            ) from None


def sum_over_replicas(
    context: tf.distribute.ReplicaContext | None,
    grads: Sequence[Gradient],
    variables: Variables,
    step: tf.Tensor,
) -> list[Gradient]:
    """Returns the sums of the gradients over all replicas; None stays None. Within a replica; outside of replicas nothing is summed."""
    if context and uses_bucketed_all_reduce(context.strategy):
        grads = gradient_lists.with_static_shapes(grads, variables)
        present = [grad for grad in grads if grad is not None]
        if not present:
            return list(grads)
        totals = iter(context.merge_call(functools.partial(bucketed_all_reduce, step=step), args=(present,)))
        return [None if grad is None else next(totals) for grad in grads]
    sparse = [index for index, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
    if not (context and sparse and traits_of(context.strategy).mirrors_in_process):
        return gradient_lists.all_reduce(tf.distribute.ReduceOp.SUM, grads)
    reduced = list(grads)
    for index in sparse:
        reduced[index] = None
    reduced = gradient_lists.all_reduce(tf.distribute.ReduceOp.SUM, reduced)
    gathered = context.merge_call(gather_rows_in_process, args=([grads[index] for index in sparse],))
    for index, total in zip(sparse, gathered, strict=True):
        reduced[index] = total
    return reduced


def sum_in_step(
    step: StepContext, grads: Sequence[Gradient], variables: Variables, number: tf.Tensor
) -> list[Gradient]:
    """Returns the sums over all replicas of a step's gradients, each weighted by its replica's share. Within a replica.

    `number` is that of the update.
    """
    context = tf.distribute.get_replica_context()
    if step.gradient_weight is not None:
        grads = gradient_lists.scale_no_nan(grads, step.gradient_weight)
    mark_gradients_ready(context, grads)
    return sum_over_replicas(context, grads, variables, number)


def mark_gradients_ready(context: tf.distribute.ReplicaContext, grads: Sequence[Gradient]) -> None:
    """Ends the measurement of the task's own time in a step, whose gradients are ready. Within a replica."""
    own_time = own_time_of(context.strategy)
    if own_time and own_time.is_measuring:
        context.merge_call(own_time.on_gradients, args=([grad for grad in grads if grad is not None],))
