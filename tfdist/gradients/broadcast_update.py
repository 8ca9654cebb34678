"""Keeps variables equal to the bit on workers whose processors round differently.

All workers apply one gradient. An optimizer that works on each number by itself then makes the same of it everywhere; one that
sums over a variable (a norm, a matrix product) may not, see `collectives.hardware`, and the workers would drift apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import hardware
from tfdist.collectives.factory import communicator_for
from tfdist.collectives.requests import AllReduce, RankContext
from tfdist.compat import keras_internals
from tfdist.gradients.reduction import uses_bucketed_all_reduce

_LANE = -3  # beside those of gradients
# Optimizers that work on each number by itself.
_ELEMENTWISE_OPTIMIZERS = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Ftrl,
    keras.optimizers.Nadam,
    keras.optimizers.Lion,
)


def may_differ_between_workers(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy, clips: bool
) -> bool:
    """Whether an update may end in another bit on another worker.

    Args:
        optimizer: The optimizer; what Keras does not know is taken for one that sums.
        strategy: Under which it updates.
        clips: Whether it clips by a norm what all workers have reduced.
    """
    if not (hardware.describe_difference(strategy) and uses_bucketed_all_reduce(strategy)):
        return False
    by_number = any(type(optimizer).update_step is kind.update_step for kind in _ELEMENTWISE_OPTIMIZERS)
    return not by_number or (clips and bool(optimizer.clipnorm or optimizer.global_clipnorm))


def broadcast_update(strategy: tf.distribute.Strategy, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives all workers the variables that the chief's update has made. In cross-replica context; a collective.

    Args:
        strategy: The strategy.
        optimizer: Whose variables, and those that it trains.
    """
    warnings.warn(
        f"The workers differ in {hardware.describe_difference(strategy)}, by which {type(optimizer).__name__}'s sums are rounded: the "
        "chief's variables are sent to all of them after each update. To save that, set TF_NUM_INTRAOP_THREADS to the same "
        "number on all workers.",
        stacklevel=2,
    )
    group, local = communicator_for(strategy), strategy.experimental_local_results
    own = [*keras_internals.trainable_variables(optimizer), *optimizer.variables]
    values = {id(variable.value): variable.value for variable in own if _is_replicated(variable.value)}.values()

    def chiefs(place: int, member: RankContext) -> Generator[Any, Any, Sequence[tf.Tensor]]:
        mine = [tf.cast(local(value)[place], _carrier(value.dtype)) for value in values]
        return (yield AllReduce(mine if member.rank == 0 else [tf.zeros_like(value) for value in mine]))

    members = group.contexts(tf.constant(0, tf.int64))
    for place, new_values in enumerate(group.run([chiefs(*each) for each in enumerate(members)], _LANE)):
        for value, new in zip(values, new_values, strict=True):
            local(value)[place].assign(tf.cast(new, value.dtype))


def _is_replicated(value: tf.Variable) -> bool:
    """Whether all replicas should hold the same numbers, other than accumulators of gradients."""
    return value.dtype.is_floating and value.synchronization != tf.VariableSynchronization.ON_READ


def _carrier(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype.size < tf.float32.size else dtype
