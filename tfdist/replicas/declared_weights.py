"""Weights with a declared aggregation of the replicas' values: `add_weight(aggregation="sum")` and `aggregation="only_first_replica"`.

Within a step each replica assigns and reads its own copy. A collective for each assignment would hang in a condition. And Keras adds by
`assign(self + value)`, where TensorFlow would add the old value once per replica. At the end of the step the copies are combined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist.aliases import Function, Structure
from tfdist.compat import keras_internals
from tfdist.compat.tf_internals import num_replicas, regroup
from tfdist.errors import ConfigError
from tfdist.feature import Feature, RunningStep
from tfdist.strategy import Strategy

Kind = Literal["sum", "mean", "only_first_replica"]

KINDS: dict[Any, Kind] = {
    tf.VariableAggregation.SUM: "sum",
    tf.VariableAggregation.MEAN: "mean",
    tf.VariableAggregation.ONLY_FIRST_REPLICA: "only_first_replica",
}
_KIND = "_tfdist_aggregation"  # an attribute of variables
_NOT_COMBINED = (
    "The weight {} has aggregation={!r}, and a replica assigns it where the replicas' values cannot be combined: outside of a step of the "
    "Trainer, or in a step of a model that does not have the weight. Train with trainer.fit or trainer.step, and make the weight an "
    "attribute of the model or of one of its layers."
)


class CombinedWeights(Feature):
    """The weights with a declared aggregation, which are combined after each step."""

    def step(self, step: RunningStep, run: Callable[[], None]) -> None:
        with combining(self.strategy, step.model, step.trains) as combine:
            run()
            combine(step.counts)


def declare(strategy: Strategy, variable: tf.Variable, kind: Kind, name: str) -> None:
    """Records the declared aggregation of a weight with a copy on each replica, in place.

    Replicas may assign the weight only within `combining`, except if it is a mean (see `MovingStatistics`). `name` is for messages.
    """
    setattr(variable, _KIND, kind)
    if kind == "mean":
        return

    def checked(own: Function) -> Function:
        def assign(*args: Any, **kwargs: Any) -> tf.Variable | tf.Tensor:
            in_replica = tf.distribute.get_strategy() is strategy and not tf.distribute.in_cross_replica_context()
            if in_replica and num_replicas(strategy) > 1 and id(variable) not in strategy.combined_weights:
                raise ConfigError(_NOT_COMBINED.format(name, kind))
            return own(*args, **kwargs)

        return assign

    for method in ("assign", "assign_add", "assign_sub"):
        setattr(variable, method, checked(getattr(variable, method)))


def declared(variable: tf.Variable) -> Kind | None:
    """Returns the aggregation that a weight declares; None if it declares nothing, or is not a Keras weight that replicas assign."""
    return getattr(variable, _KIND, None)


def combined_variables(model: keras.Model, trains: bool = True) -> list[tf.Variable]:
    """Returns a model's variables whose copies are combined at the end of each step.

    Means are combined only after steps that do not train; after training they are averaged when they are read (see
    `MovingStatistics.synchronized`).
    """
    kinds = ["sum", "only_first_replica"]
    if not trains:
        kinds.append("mean")
    return [
        value for value in map(keras_internals.raw_value, model.non_trainable_variables) if declared(value) in kinds
    ]


@contextlib.contextmanager
def combining(strategy: Strategy, model: keras.Model, trains: bool) -> Iterator[Callable[[Structure], None]]:
    """Combines the replicas' assignments of one step to a model's weights. Outside of replicas, around the step.

    `"sum"`: the value before the step, plus the sum of the replicas' increments. `"only_first_replica"`: the value of replica 0.
    `"mean"`: the mean over the replicas that have examples.

    Yields:
        A function to call after the step, a collective if the model has such weights. Its argument is the number
        of examples of each replica, or None if all replicas have examples: a replica without examples changes nothing.
    """
    variables = combined_variables(model, trains) if num_replicas(strategy) > 1 else []
    if not variables:
        yield lambda counts: None
        return
    local = strategy.experimental_local_results
    before = [[component.read_value() for component in local(variable)] for variable in variables]

    def combine(counts: Structure) -> None:
        has_examples = [True] * len(before[0])
        if counts is not None:
            has_examples = [tf.reshape(count, [-1])[0] > 0 for count in local(counts)]
        changes = [_changes(strategy, *pair, has_examples) for pair in zip(variables, before, strict=True)]
        for variable, old, total in zip(variables, before, _sums(strategy, variables, changes), strict=True):
            for component, value in zip(local(variable), old, strict=True):
                with tf.device(component.device):
                    component.assign(_combined(declared(variable), value, total))

    strategy.combined_weights = {id(variable) for variable in variables}
    try:
        yield combine
    finally:
        strategy.combined_weights = set()


def _changes(
    strategy: Strategy, variable: tf.Variable, before: Sequence[tf.Tensor], has_examples: Sequence[tf.Tensor | bool]
) -> list[tf.Tensor]:
    """Returns what each replica of this process adds to the sum over all replicas, flat. For a mean, the last element counts the replicas."""
    changes = []
    components = strategy.experimental_local_results(variable)
    for number, component, old, has in zip(strategy.local_replicas, components, before, has_examples, strict=True):
        with tf.device(component.device):
            wire = _wire(variable.dtype)
            new = tf.reshape(tf.cast(component.read_value(), wire), [-1])
            old = tf.reshape(tf.cast(old, wire), [-1])
            if declared(variable) == "sum":
                change = tf.where(has, new - old, tf.zeros_like(old))
            elif declared(variable) == "mean":
                change = tf.concat([new, tf.ones([1], wire)], 0)
                change = tf.where(has, change, tf.zeros_like(change))
            elif number == 0:  # only the first replica's value counts
                change = tf.where(has, new, old)
            else:
                change = tf.zeros_like(old)
            changes.append(change)
    return changes


def _combined(kind: Kind | None, before: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Returns the value after a step, from the summed `_changes`."""
    if kind == "mean":
        count = total[-1]
        total = tf.where(count > 0, total[:-1] / count, tf.reshape(tf.cast(before, total.dtype), [-1]))
    new = tf.cast(tf.reshape(total, before.shape), before.dtype)
    return before + new if kind == "sum" else new


def _sums(strategy: Strategy, variables: Sequence[tf.Variable], changes: Sequence[list[tf.Tensor]]) -> list[tf.Tensor]:
    """Returns the sum of each variable's changes over all replicas, by one collective for each dtype."""
    sums: dict[int, tf.Tensor] = {}
    for wire in dict.fromkeys(_wire(variable.dtype) for variable in variables):
        indices = [index for index, variable in enumerate(variables) if _wire(variable.dtype) == wire]
        packed = [tf.concat(parts, 0) for parts in zip(*(changes[index] for index in indices), strict=True)]
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, regroup(tuple(packed)), axis=None)
        sizes = [variables[index].shape.num_elements() + (declared(variables[index]) == "mean") for index in indices]
        sums |= dict(zip(indices, tf.split(total, sizes), strict=True))
    return [sums[index] for index in range(len(variables))]


def _wire(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which values of `dtype` are summed, which represents each of them exactly."""
    if dtype.is_floating:
        return tf.float64 if dtype == tf.float64 else tf.float32
    return tf.int64
