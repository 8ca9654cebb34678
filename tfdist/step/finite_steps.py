"""The NaN policies `skip` and `stop`: steps whose gradient is not finite change nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_internals
from tfdist.feature import Feature, RunningStep
from tfdist.gradients.finite_updates import skip_non_finite, skipped_updates
from tfdist.replicas import declared_weights
from tfdist.step import empty_replicas


class FiniteSteps(Feature):
    """The steps whose gradient is not finite: their updates are skipped, and what they have assigned is undone."""

    after = ("gradient_sums", "declared_weights")
    _policy = "ignore"

    def needs_update(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> bool:
        return bool(engine.nan_policy != "ignore")

    def attach_model(self, model: keras.Model, engine: Any) -> None:
        self._policy = engine.nan_policy

    def attach(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> None:
        if engine.nan_policy != "ignore":
            skip_non_finite(optimizer, self.strategy)

    def step(self, step: RunningStep, run: Callable[[], None]) -> None:
        if not step.trains:
            return run()
        with _undoing_skipped_step(
            step.model, keeps_metrics=self._policy == "stop"
        ):  # it needs the loss of the skipped step
            run()

    def summary(self, model: keras.Model, workers: int) -> dict[str, Any]:
        if self._policy != "skip":
            return {}
        return {"skipped_updates": sum(int(number.numpy()) for number in skipped_updates(model))}


@contextlib.contextmanager
def _undoing_skipped_step(model: keras.Model, keeps_metrics: bool) -> Iterator[None]:
    """Restores variables to their values before the enclosed step if it skipped an update. Outside of replicas.

    The batch of a skipped step may have made moving statistics and metrics NaN, too. With `keeps_metrics` metrics keep the step's update.
    """
    counts = skipped_updates(model)
    if not counts:
        yield
        return
    local = model.distribute_strategy.experimental_local_results
    variables = [
        value for value in map(keras_internals.raw_value, model.non_trainable_variables) if value.dtype.is_floating
    ]
    variables += [v for v in declared_weights.combined_variables(model) if not v.dtype.is_floating]
    if not keeps_metrics:
        variables += empty_replicas.metric_variables(model)
    components = [component for variable in variables for component in local(variable)]

    def skipped() -> tf.Tensor:
        return tf.add_n([local(count)[0].read_value() for count in counts])

    before = [component.read_value() for component in components]
    number = skipped()
    yield

    def undo() -> None:
        for component, value in zip(components, before, strict=True):
            component.assign(value)

    tf.cond(skipped() > number, undo, lambda: None)
