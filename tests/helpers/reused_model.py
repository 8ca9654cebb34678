"""A model that several trainings of a test process share, so that TensorFlow traces it once: each begins as with a new model."""

from __future__ import annotations

import keras
import tensorflow as tf


class ReusedModel:
    """A compiled model with its first values.

    Args:
        model: A model that is built, compiled, and not trained.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        strategy = model.distribute_strategy
        if not model.optimizer.built:
            with strategy.scope():
                model.optimizer.build(model.trainable_variables)
        variables = [*model.variables, *model.optimizer.variables]
        components = [
            component for variable in variables for component in strategy.experimental_local_results(variable.value)
        ]
        self._first_values: list[tuple[tf.Variable, object]] = [(each, each.numpy()) for each in components]

    def reset(self) -> keras.Model:
        """Returns the model with the values that it had at first, on each replica."""
        for component, value in self._first_values:
            component.assign(value)
        self._model.reset_metrics()
        self._model.stop_training = False
        return self._model
