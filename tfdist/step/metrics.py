"""Metrics that are not sums over examples: each replica updates them with the whole batch.

Keras sums the variables of a metric over the replicas. That is right if a metric counts each example independently, as those of
`keras.metrics` do. It is wrong for a function that returns one number for a batch (Dice) and for a correlation along the batch. It is wrong, too,
for a class that keeps a maximum or adds one number for a batch. Such a metric receives the whole batch on each replica (`whole_batch`), so that it
computes the values of one process.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.compat import keras_metrics
from tfdist.compat.tf_internals import all_reduce, num_replicas
from tfdist.replicas import step_context
from tfdist.replicas.step_context import StepContext
from tfdist.step import whole_batch
from tfdist.step.compared_examples import compares_examples
from tfdist.step.graph_copies import trace_apart

logger = logging.getLogger(__name__)

# Keras' own functions whose values depend on the other examples of a batch.
_BATCH_FUNCTIONS = (keras.losses.circle, keras.losses.dice, keras.losses.tversky)
_PARTS_COUNTED = (
    "The metric {} is counted on each replica's part of the batch, and the parts are added up: {}. That is right only if it counts each "
    "example by itself. If it does, set `sums_examples = True` in its class, or let its function return one value for each example; "
    "otherwise evaluate it with one replica."
)

Kind = Literal["examples", "mean", "state"]


def kind(metric: keras.metrics.Metric) -> Kind | None:
    """Returns how the replicas compute a metric; None if that depends on its function's result.

    - `"examples"`: it counts each example independently, so each replica counts its own. Keras' own classes do, and classes with an
      attribute `sums_examples = True`.
    - `"mean"`: it is the mean of a function, which receives the whole batch.
    - `"state"`: its class has a custom update, which receives the whole batch.
    """
    if getattr(metric, "sums_examples", False):
        return "examples"
    if not keras_metrics.is_keras_code(type(metric).update_state):
        return "state"
    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return "examples"
    function, arguments = keras_metrics.function(metric)
    if not keras_metrics.is_keras_code(function):
        return None
    return "mean" if function in _BATCH_FUNCTIONS or arguments.get("axis", -1) != -1 else "examples"


def give_whole_batch(model: keras.Model) -> None:
    """Replaces updates of a model's metrics so that they are correct in a step on one of several replicas, in place."""
    compiled = keras_metrics.compiled_metrics(model)
    if compiled is not None and not compiled.built and "build" not in vars(compiled):
        replace_after_build(compiled, lambda: _replace_updates(compiled.metrics))
    _replace_updates(keras_metrics.metrics(model))


def replace_after_build(compiled: Any, replace: Callable[[], None]) -> None:
    """Makes `build` of a model's compiled losses or metrics replace the objects that it has built, too."""
    build = compiled.build

    def build_and_replace(*args: Any, **kwargs: Any) -> None:
        build(*args, **kwargs)
        replace()

    compiled.build = build_and_replace


def _replace_updates(metrics: Iterable[keras.metrics.Metric]) -> None:
    for metric in metrics:
        if "update_state" in vars(metric):
            continue
        known = kind(metric)
        if known != "examples":
            metric.update_state = _WholeBatchUpdate(metric, known)
        if known == "state":
            metric.result = functools.partial(_result_of_state, metric, metric.result)


class _WholeBatchUpdate:
    """The replacement of `update_state` for a metric that is not a sum over examples.

    Attributes:
        has_seen_whole_batch: Whether the metric was updated with the whole batch when a step was last traced. All replicas then
            take part, including replicas without examples.
    """

    def __init__(self, metric: keras.metrics.Metric, known: Kind | None):
        self._metric = metric
        self._update = metric.update_state
        self._kind = known
        self._warned = False
        self.has_seen_whole_batch = False

    def __call__(self, *args: Any, **kwargs: Any) -> Structure:
        step = step_context.current()
        if step is None or step.is_alone:
            return self._update(*args, **kwargs)
        self._kind = self._kind or self._kind_of_function(*args, **kwargs)
        if self._kind == "examples":
            return self._update(*args, **kwargs)
        obstacle = self._obstacle(step, args, kwargs)
        if obstacle is not None:
            self.has_seen_whole_batch = False
            if not self._warned:
                logger.warning(_PARTS_COUNTED.format(self._metric.name, obstacle))
            self._warned = True
            return self._update(*args, **kwargs)
        self.has_seen_whole_batch = True
        whole_args, whole_kwargs = whole_batch.gathered_values(step, (args, kwargs))
        variables = self._metric.variables
        # A mean adds to its variables, so it may start from 0, and the result is added afterwards. A custom update may compute anything
        # from its state, so it starts from the state of all replicas.
        before = [tf.zeros(v.shape, v.dtype) for v in variables] if self._kind == "mean" else summed(variables)
        with step_context.running(None), _holding(variables, before) as scope:
            self._update(*whole_args, **whole_kwargs)
        after = [scope.get_current_value(v) for v in variables]
        context = tf.distribute.get_replica_context()
        for variable, value in zip(variables, after, strict=True):
            if self._kind == "mean":  # each replica adds an equal part of the common result
                variable.assign_add(value / num_replicas(context.strategy))
            else:  # Keras sums over replicas: one replica holds the value, the others hold 0
                is_first = tf.equal(context.replica_id_in_sync_group, 0)
                variable.assign(tf.where(is_first, value, tf.zeros_like(value)))
        return None

    def _kind_of_function(self, y_true: Structure, y_pred: Structure, sample_weight: Structure = None) -> Kind:
        """Returns "examples" if the function of a `MeanMetricWrapper`, traced apart from the step, has a value for each example, else "mean"."""
        function, arguments = keras_metrics.function(self._metric)
        if tf.executing_eagerly():  # an eager function may contain code that cannot be traced
            return "mean"

        def values(*rows: Structure) -> Structure:
            return function(*rows, **arguments)

        rows = tf.nest.map_structure(tf.type_spec_from_value, (y_true, y_pred))
        try:
            value, _ = trace_apart(values, rows)
        except Exception:  # the step will raise an error of the function again
            return "mean"
        has_rows = tf.convert_to_tensor(value).shape.rank
        return "examples" if has_rows and not compares_examples(values, y_true, y_pred) else "mean"

    def _obstacle(self, step: StepContext, args: Sequence[Structure], kwargs: Mapping[str, Any]) -> str | None:
        if step.graph is not None and step.graph is not tf.compat.v1.get_default_graph():
            return "it is updated within tf.cond, a loop or a tf.function, where replicas gather nothing"
        return whole_batch.obstacle(step, self._metric.dtype, (args, kwargs))


def _result_of_state(metric: keras.metrics.Metric, result: Callable[[], Any]) -> Any:
    """Computes the `result` of a metric whose variables one replica holds; it is equal on all replicas."""
    step = step_context.current()
    if step is None or step.is_alone or not metric.update_state.has_seen_whole_batch:
        return result()
    variables = metric.variables
    with _holding(variables, summed(variables)):  # `result` may return a variable, which must be read within the scope
        return tf.nest.map_structure(tf.convert_to_tensor, result())


def summed(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Returns the sums over replicas of a metric's variables. A collective."""
    if not variables:
        return []
    # One message; float64 holds counts, too.
    packed = tf.concat([tf.reshape(tf.cast(v.value, tf.float64), [-1]) for v in variables], 0)
    total = all_reduce(tf.distribute.ReduceOp.SUM, packed)
    tf.distribute.get_strategy().decorrelate_random_numbers()  # this replica has waited for the others
    parts = tf.split(total, [math.prod(v.shape) for v in variables])
    return [tf.cast(tf.reshape(part, v.shape), v.dtype) for part, v in zip(parts, variables, strict=True)]


def _holding(variables: Sequence[keras.Variable], values: Sequence[Structure]) -> keras.StatelessScope:
    """Returns a scope in which variables hold other values, and assignments to them are recorded."""
    return keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True)))
