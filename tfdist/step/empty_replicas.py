"""Restores metrics and statistics of replicas without examples, which run a step on a padding example.

See `replicas.batch_splitting` for the padding example. Such a replica's loss and gradient have no weight, because its share of the
batch is 0 (see `step.losses` and `gradients.optimizer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_metrics
from tfdist.compat.tf_internals import num_replicas
from tfdist.replicas import batch_splitting


def metric_variables(model: keras.Model) -> list[tf.Variable]:
    """Returns the variables in which a model's metrics accumulate."""
    return [variable.value for metric in model.metrics for variable in metric.variables]


def has_seen_whole_batch(metric: keras.metrics.Metric) -> bool:
    """Returns whether the step that is being traced has updated a metric with the whole batch (`step.metrics`), on all replicas."""
    return getattr(metric.update_state, "has_seen_whole_batch", False)


def moving_statistic_variables(model: keras.Model) -> list[tf.Variable]:
    """Returns a model's variables with a separate value on each replica (see `MovingStatistics`)."""
    known = model.distribute_strategy.statistics
    return [variable.value for variable in model.non_trainable_variables if variable.value in known]


def snapshot_statistics(model: keras.Model, examples: tf.Tensor, totals: tf.Tensor) -> Callable[[], list[tf.Tensor]]:
    """Records a replica's metrics and statistics before a step.

    Args:
        model: The model.
        examples: The number of this replica's examples.
        totals: The result of `batch_splitting.count_examples`.

    Returns:
        A function to call after the step. If this replica had no examples, it restores metrics and statistics. It returns the change of
        each statistic as a flat tensor, of size 0 if every replica had examples.
    """
    metrics, statistics = metric_variables(model), moving_statistic_variables(model)
    has_empty_replicas = totals[1] < num_replicas(model.distribute_strategy)

    def flat(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        return [tf.reshape(variable.read_value(), [-1]) for variable in variables]

    def empty(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        return [tf.zeros([0], variable.dtype) for variable in variables]

    both = [*metrics, *statistics]
    before = _cond(has_empty_replicas, lambda: flat(both), lambda: empty(both))

    def restore() -> list[tf.Tensor]:
        metrics_of_whole_batch = filter(has_seen_whole_batch, keras_metrics.metrics(model))
        unaffected = {id(v.value) for metric in metrics_of_whole_batch for v in metric.variables}
        for variable, value in zip(both, before, strict=True):
            if id(variable) not in unaffected:
                variable.assign(tf.reshape(value, variable.shape))
        return []

    def moved() -> list[tf.Tensor]:
        return [now - old for now, old in zip(flat(statistics), before[len(metrics) :], strict=True)]

    def after() -> list[tf.Tensor]:
        _cond(tf.equal(examples, 0), restore, list)
        return _cond(has_empty_replicas, moved, lambda: empty(statistics))

    return after


def average_statistics(model: keras.Model, totals: tf.Tensor) -> None:
    """Averages the replicas' statistics before a step for which some replicas have no examples. Call it outside of replicas.

    A replica's new statistics depend on its old ones. Without this average, the mean over all replicas would depend on which replicas
    have no examples.
    """
    strategy, variables = model.distribute_strategy, moving_statistic_variables(model)

    def average() -> list[tf.Tensor]:
        strategy.statistics.average(variables)
        return []

    if variables:
        _cond(totals[1] < strategy.num_replicas_in_sync, average, list)


def move_empty_replicas_statistics(
    model: keras.Model, split_batch: batch_splitting.SplitBatch, totals: tf.Tensor, moves: list[Any]
) -> None:
    """Adds the mean change of the other replicas' statistics to the statistics of replicas without examples. Call it outside of replicas, after the step.

    All replicas started with the same values (`average_statistics`). `moves` are the results of the functions that
    `snapshot_statistics` returned.
    """
    strategy, variables = model.distribute_strategy, moving_statistic_variables(model)

    def write(counts: tf.Tensor, means: list[tf.Tensor]) -> None:
        for variable, mean in zip(variables, means, strict=True):
            variable.assign_add(tf.where(counts[0, 0] > 0, tf.zeros_like(mean), mean))

    def apply_mean_moves() -> list[tf.Tensor]:
        sums = [strategy.reduce("SUM", move, axis=None) for move in moves]
        means = [
            tf.reshape(total / tf.cast(totals[1], total.dtype), v.shape)
            for total, v in zip(sums, variables, strict=True)
        ]
        strategy.run(write, args=(split_batch.counts, means))
        return []

    if variables:
        _cond(totals[1] < strategy.num_replicas_in_sync, apply_mean_moves, list)


def _cond(
    condition: tf.Tensor, yes: Callable[[], list[tf.Tensor]], no: Callable[[], list[tf.Tensor]]
) -> list[tf.Tensor]:
    def numbered(branch: Callable[[], list[tf.Tensor]]) -> Callable[[], list[tf.Tensor]]:
        return lambda: [tf.constant(0), *branch()]  # TensorFlow would not run a branch without outputs

    return list(tf.cond(condition, numbered(yes), numbered(no))[1:])
