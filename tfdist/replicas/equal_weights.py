"""Checks of weights without an aggregation, which must be equal on all replicas: counts, and trainable weights that a step updates by hand.

Trained weights that a step does not assign differ only if the optimizer's update does.

Each replica assigns its own copy, from its own part of the batch, and TensorFlow reads one of the copies. A count that depends on the
data would be the count of one replica, even if all have the same number of examples. Tracing such a step raises ConfigError. Other
weights are compared after the first step and after each epoch. Untrained floating-point weights are averaged (`MovingStatistics`), which is
right for a moving mean. If a class assigns such a weight a value that depends on the data, without a declared aggregation, a warning is logged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Function
from tfdist.compat import call_stack, keras_internals
from tfdist.compat.tf_internals import EagerTensor, num_replicas
from tfdist.errors import ConfigError, format_value
from tfdist.replicas import declared_weights
from tfdist.runtime.log import logger
from tfdist.strategy import Strategy

_ASSIGNED = "_tfdist_assigned_on_replica"  # an attribute of guarded variables
# Names operations whose results are equal on all replicas, though they depend on data.
EQUAL_ON_REPLICAS = "tfdist_whole_batch"
_READS = ("ReadVariableOp", "VarHandleOp")
_ROUNDING = 1e-5  # relative and absolute difference that devices of different kinds may cause

_COUNT = (
    "The integer weight {} is assigned a value that depends on the data, and each replica would keep its own value. Create it with "
    'aggregation="sum" if it counts, or compute what it is assigned from tfdist.whole_batch(tensor).'
)
_AVERAGED = (
    "{} assigned a value that depends on the data, and declared no aggregation: with several replicas the value is the mean of the replicas' own "
    'values. If it is a moving mean, create it with aggregation="mean"; if it counts or adds up, with aggregation="sum"; for a maximum, a '
    "queue or a codebook compute it from tfdist.whole_batch(tensor)."
)
_BY_OPTIMIZER = (
    "The weight {} is not the same on all replicas, though no step assigns it: the optimizer's update is not a function of the gradient and "
    "the optimizer's variables alone. Does it draw random numbers without a seed (keras.utils.set_random_seed), or with run_eagerly=True?"
)
_BY_HAND = (
    "The weight {} is not the same on all replicas: a step assigns it what a replica computes from its own part of the batch. Apply "
    "an optimizer (self.optimizer.apply_gradients), or, where each replica has as many examples as any other, average the gradient "
    "before you use it: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradient)."
)


def guard(strategy: tf.distribute.Strategy, weights: Iterable[keras.Variable]) -> bool:
    """Makes weights without an aggregation record that replicas assign them, in place; integers raise if the value depends on data.

    Returns whether there are integer weights. The step must then be traced with an unknown batch size: a known size is a constant.
    """
    integers = False
    for weight in weights:
        variable = keras_internals.raw_value(weight)
        if not isinstance(variable, tf.distribute.DistributedValues):
            continue
        if variable.aggregation != tf.VariableAggregation.NONE or declared_weights.declared(variable) is not None:
            continue
        integers |= variable.dtype.is_integer
        if hasattr(variable, _ASSIGNED):
            continue
        setattr(variable, _ASSIGNED, False)
        for name in dir(variable):
            if name.startswith(("assign", "scatter_")):
                setattr(variable, name, _guarded(strategy, weight, getattr(variable, name)))
    return integers


def _guarded(strategy: tf.distribute.Strategy, weight: keras.Variable, own: Function) -> Function:
    def assign(*args: Any, **kwargs: Any) -> tf.Variable | tf.Tensor:
        if tf.distribute.get_strategy() is strategy and not tf.distribute.in_cross_replica_context():
            setattr(keras_internals.raw_value(weight), _ASSIGNED, True)
            values = tf.nest.flatten((args, kwargs), expand_composites=True)
            if keras_internals.raw_value(weight).dtype.is_integer and _depends_on_data(values):
                raise ConfigError(_COUNT.format(weight.path))
        return own(*args, **kwargs)

    return assign


def _depends_on_data(values: Iterable[object]) -> bool:
    """Returns whether a value depends on an argument of a traced function, on an iterator or on another stateful operation.

    Values of the whole batch are equal on all replicas, and do not count.
    """
    pending = list(values)
    seen = set()
    while pending:
        tensor = pending.pop()
        if not isinstance(tensor, tf.Tensor) or isinstance(tensor, EagerTensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        op = tensor.op
        if EQUAL_ON_REPLICAS in op.name:
            continue
        if op.type == "Placeholder":
            outer = [outside for outside, inside in getattr(op.graph, "captures", ()) if inside is tensor]
            if not outer:
                return True
            pending += outer
        elif op.type not in _READS and op.op_def.is_stateful:
            return True
        pending += op.inputs
    return False


def watch_averages(strategy: Strategy, model: keras.Model) -> bool:
    """Makes untrained floating-point weights of custom classes record assignments of values that depend on the data, in place.

    Skips weights with a declared aggregation and weights of Keras' own layers. Returns whether it found other weights: the step must then be
    traced with an unknown batch size, as for `guard`.
    """
    watched = False
    if num_replicas(strategy) == 1:
        return watched
    owners = {id(weight): layer for layer in keras_internals.layers(model) for weight in layer.non_trainable_variables}
    for weight in model.non_trainable_variables:
        variable = keras_internals.raw_value(weight)
        owner = type(owners.get(id(weight), model))
        if owner.__module__.startswith("keras."):
            continue
        if variable not in strategy.statistics or declared_weights.declared(variable) is not None:
            continue
        watched = True
        if hasattr(variable, _ASSIGNED):
            continue
        setattr(variable, _ASSIGNED, False)
        label = f"{owner.__name__}: {weight.path}"
        for name in ("assign", "assign_add", "assign_sub"):
            setattr(variable, name, _watched(strategy, label, getattr(variable, name)))
    return watched


def _watched(strategy: Strategy, name: str, own: Function) -> Function:
    def assign(*args: Any, **kwargs: Any) -> tf.Variable | tf.Tensor:
        if (
            name not in strategy.statistics.undeclared
            and tf.distribute.get_strategy() is strategy
            and not tf.distribute.in_cross_replica_context()
            and _depends_on_data(tf.nest.flatten((args, kwargs), expand_composites=True))
            and call_stack.is_assigned_by_users()
        ):
            strategy.statistics.undeclared[name] = False
        return own(*args, **kwargs)

    return assign


def warn_of_averages(strategy: Strategy) -> None:
    """Warns, once and on the first rank, of the weights that `watch_averages` has recorded."""
    noticed = strategy.statistics.undeclared
    new = [name for name, warned in noticed.items() if not warned]
    noticed |= dict.fromkeys(new, True)
    if new and strategy.local_replicas[0] == 0:
        weights = f"The weight {new[0]} is" if len(new) == 1 else f"The weights {', '.join(new)} are"
        logger.warning(_AVERAGED.format(weights))


def check_equal_on_replicas(
    strategy: tf.distribute.Strategy, weights: Iterable[keras.Variable], by_optimizer: bool = True
) -> None:
    """Raises ConfigError if this process's replicas hold different values of weights that they assigned; names these weights.

    With `by_optimizer` also compares the weights that only the optimizer changes.
    """
    faults = []
    for weight in weights:
        value = keras_internals.raw_value(weight)
        is_assigned = getattr(value, _ASSIGNED, False)
        if not is_assigned and not (by_optimizer and weight.trainable):
            continue
        components = strategy.experimental_local_results(value)
        if len(components) == 1:
            continue
        numbers = [component.numpy() for component in components]
        if value.dtype.is_integer and any((number != numbers[0]).any() for number in numbers):
            held = ", ".join(format_value(number.tolist()) for number in numbers)
            faults.append(_COUNT.format(weight.path) + f" The replicas hold {held}.")
        elif not all(np.allclose(value, numbers[0], _ROUNDING, _ROUNDING, equal_nan=True) for value in numbers):
            message = _BY_HAND if is_assigned else _BY_OPTIMIZER
            faults.append(message.format(weight.path))
    if faults:
        raise ConfigError(faults)
