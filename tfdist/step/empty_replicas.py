"""Leaves out metrics and statistics of replicas without examples, which run a step on a padding example.

See `replicas.batch_splitting` for the padding example. Such a replica's loss and gradient have no weight, because its share of the
batch is 0 (see `step.losses` and `gradients.optimizer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_internals, keras_metrics
from tfdist.compat.tf_internals import num_replicas


def metric_variables(model: keras.Model) -> list[tf.Variable]:
    """Returns the variables in which a model's metrics accumulate."""
    return [variable.value for metric in model.metrics for variable in metric.variables]


def has_seen_whole_batch(metric: keras.metrics.Metric) -> bool:
    """Returns whether the step that is being traced has updated a metric with the whole batch (`step.metrics`), on all replicas."""
    return getattr(metric.update_state, "has_seen_whole_batch", False)


def moving_statistic_variables(model: keras.Model) -> list[tf.Variable]:
    """Returns a model's variables with a separate value on each replica (see `MovingStatistics`)."""
    known = model.distribute_strategy.statistics
    return [value for value in map(keras_internals.raw_value, model.non_trainable_variables) if value in known]


def snapshot_metrics(model: keras.Model, examples: tf.Tensor, totals: tf.Tensor) -> Callable[[], list[tf.Tensor]]:
    """Records a replica's metrics before a step. `totals` is the result of `batch_splitting.count_examples`.

    Returns:
        A function to call after the step. If this replica had no examples, it restores the metrics. It returns this replica's part of the
        sum of each statistic, as a flat tensor: its value, or zeros if it had no examples. The size is 0 if every replica had examples.
    """
    metrics = metric_variables(model)
    statistics = moving_statistic_variables(model)
    has_empty_replicas = totals[1] < num_replicas(model.distribute_strategy)

    def flat(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        return [tf.reshape(variable.read_value(), [-1]) for variable in variables]

    def empty(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        return [tf.zeros([0], variable.dtype) for variable in variables]

    # The conditions spare the copies if all replicas have examples, as in most steps.
    before = _cond(has_empty_replicas, lambda: flat(metrics), lambda: empty(metrics))

    def restore() -> list[tf.Tensor]:
        metrics_of_whole_batch = filter(has_seen_whole_batch, keras_metrics.metrics(model))
        unaffected = {id(v.value) for metric in metrics_of_whole_batch for v in metric.variables}
        for variable, value in zip(metrics, before, strict=True):
            if id(variable) not in unaffected:
                variable.assign(tf.reshape(value, variable.shape))
        return []

    def counted() -> list[tf.Tensor]:
        return [tf.where(examples > 0, value, tf.zeros_like(value)) for value in flat(statistics)]

    def after() -> list[tf.Tensor]:
        _cond(tf.equal(examples, 0), restore, list)
        return _cond(has_empty_replicas, counted, lambda: empty(statistics))

    return after


def average_statistics(model: keras.Model, totals: tf.Tensor) -> None:
    """Averages the replicas' statistics before a step for which some replicas have no examples. Call it outside of replicas.

    A replica's new statistics depend on its old ones. Without this average, the mean over all replicas would depend on which replicas
    have no examples.
    """
    strategy = model.distribute_strategy
    variables = moving_statistic_variables(model)

    def average() -> list[tf.Tensor]:
        strategy.statistics.average(variables)
        return []

    if variables:
        _cond(totals[1] < strategy.num_replicas_in_sync, average, list)


def leave_out_empty_replicas(model: keras.Model, totals: tf.Tensor, counted: list[Any]) -> None:
    """Sets the statistics of all replicas to the mean over the replicas with examples. Call it outside of replicas, after the step.

    Replicas whose values were equal stay equal to the bit, as values that are computed from the whole batch must. `counted` are the results
    of the functions that `snapshot_metrics` returned.
    """
    strategy = model.distribute_strategy
    variables = moving_statistic_variables(model)

    def write(means: list[tf.Tensor]) -> None:
        for variable, mean in zip(variables, means, strict=True):
            variable.assign(mean)

    def set_means() -> list[tf.Tensor]:
        means = []
        for values, variable in zip(counted, variables, strict=True):
            total = strategy.reduce("SUM", values, axis=None)
            means.append(tf.reshape(total / tf.cast(totals[1], total.dtype), variable.shape))
        strategy.run(write, args=(means,))
        return []

    if variables:
        _cond(totals[1] < strategy.num_replicas_in_sync, set_means, list)


def _cond(
    condition: tf.Tensor, yes: Callable[[], list[tf.Tensor]], no: Callable[[], list[tf.Tensor]]
) -> list[tf.Tensor]:
    def numbered(branch: Callable[[], list[tf.Tensor]]) -> Callable[[], list[tf.Tensor]]:
        return lambda: [tf.constant(0), *branch()]  # TensorFlow would not run a branch without outputs

    return list(tf.cond(condition, numbered(yes), numbered(no))[1:])
