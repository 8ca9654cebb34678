"""Undoes what a step whose update is left out has done beside it: moving statistics and metrics that its batch has made NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfdist.gradients.optimizer import skipped_updates
from tfdist.step.empty_replicas import metric_variables
from tfdist.step.replica_step import ReplicaStep


@contextlib.contextmanager
def undo_skipped_step(replica: ReplicaStep, keeps_metrics: bool) -> Iterator[None]:
    """Gives variables back the values from before the step inside, if an update was left out. Outside of replicas.

    Args:
        replica: The step.
        keeps_metrics: Whether metrics stay as the step has made them.
    """
    model = replica.model
    counts = skipped_updates(model) if replica.trains else []
    if not counts:
        yield
        return
    local = model.distribute_strategy.experimental_local_results
    kept = [each.value for each in model.non_trainable_variables if each.value.dtype.is_floating]
    kept += [] if keeps_metrics else metric_variables(model)
    components = [component for variable in kept for component in local(variable)]

    def skipped() -> tf.Tensor:
        return tf.add_n([local(count)[0].read_value() for count in counts])

    before, number = [component.read_value() for component in components], skipped()
    yield

    def undo() -> None:
        for component, value in zip(components, before, strict=True):
            component.assign(value)

    tf.cond(skipped() > number, undo, lambda: None)
