"""Weights that Keras gives no aggregation must be equal on all replicas: counts, and trainable weights that a step updates by hand.

TensorFlow lets each replica assign its own copy, from its own part of the batch, and reads one of them. A count that depends on the
data would be that of one replica, also where all have equally many examples: that is refused when the step is traced. Other
weights are compared after the first step and after each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.tf_internals import EagerTensor
from tfdist.errors import ConfigError, format_value
from tfdist.replicas import declared_weights

_ASSIGNED = "_tfdist_assigned_on_replica"  # an attribute of guarded variables
EQUAL_ON_REPLICAS = (
    "tfdist_whole_batch"  # names operations whose results are the same on all replicas, though they depend on data
)
_READS = ("ReadVariableOp", "VarHandleOp")
_ROUNDING = 1e-5  # devices of different kinds may part by it

_COUNT = (
    "The integer weight {} is assigned what depends on the data, and each replica would keep its own value. Use a metric, a weight of "
    "floating-point numbers, which is averaged, or a tf.Variable, of which each replica keeps its own."
)
_BY_HAND = (
    "The weight {} is not the same on all replicas: a step assigns it what a replica computes from its own part of the batch. Apply "
    "an optimizer (self.optimizer.apply_gradients), or, where each replica has as many examples as any other, average the gradient "
    "before you use it: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradient)."
)


def guard(strategy: tf.distribute.Strategy, weights: Iterable[Any]) -> bool:
    """Makes weights without an aggregation note that a replica assigns them, and integers raise if that depends on data. In place.

    Args:
        strategy: In whose replicas they are assigned.
        weights: Keras variables of a model.

    Returns:
        Whether there are integers among them: the step must then be traced with an unknown batch size, as a known one is a constant.
    """
    integers = False
    for weight in weights:
        variable = weight.value
        if (
            isinstance(variable, tf.distribute.DistributedValues)
            and variable.aggregation == tf.VariableAggregation.NONE
            and declared_weights.declared(variable) is None
        ):
            integers |= variable.dtype.is_integer
            if not hasattr(variable, _ASSIGNED):
                setattr(variable, _ASSIGNED, False)
                for name in dir(variable):
                    if name.startswith(("assign", "scatter_")):
                        setattr(variable, name, _guarded(strategy, weight, getattr(variable, name)))
    return integers


def _guarded(strategy: tf.distribute.Strategy, weight: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    def assign(*args: Any, **kwargs: Any) -> Any:
        if tf.distribute.get_strategy() is strategy and not tf.distribute.in_cross_replica_context():
            setattr(weight.value, _ASSIGNED, True)
            values = tf.nest.flatten((args, kwargs), expand_composites=True)
            if weight.value.dtype.is_integer and _depends_on_data(values):
                raise ConfigError(_COUNT.format(weight.path))
        return own(*args, **kwargs)

    return assign


def _depends_on_data(values: Iterable[Any]) -> bool:
    """Whether one of the values comes from an argument of a traced function, from an iterator, or from anything else stateful."""
    pending, seen = list(values), set()
    while pending:
        tensor = pending.pop()
        if not isinstance(tensor, tf.Tensor) or isinstance(tensor, EagerTensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        op = tensor.op
        if op.type == "Placeholder":
            outer = [outside for outside, inside in getattr(op.graph, "captures", ()) if inside is tensor]
            if not outer:
                return True
            pending += outer
        elif op.type not in _READS and op.op_def.is_stateful:
            return True
        pending += op.inputs
    return False


def check_equal_on_replicas(strategy: tf.distribute.Strategy, weights: Iterable[Any]) -> None:
    """Raises if this process's replicas hold different values of a weight that they have assigned.

    Args:
        strategy: The strategy.
        weights: Keras variables of a model.

    Raises:
        ConfigError: They do; names the weights.
    """
    faults = []
    for weight in weights:
        if not getattr(weight.value, _ASSIGNED, False):
            continue
        numbers = [component.numpy() for component in strategy.experimental_local_results(weight.value)]
        if weight.value.dtype.is_integer and any((number != numbers[0]).any() for number in numbers):
            held = ", ".join(format_value(number.tolist()) for number in numbers)
            faults.append(_COUNT.format(weight.path) + f" The replicas hold {held}.")
        elif not all(np.allclose(each, numbers[0], _ROUNDING, _ROUNDING, equal_nan=True) for each in numbers):
            faults.append(_BY_HAND.format(weight.path))
    if faults:
        raise ConfigError(faults)
