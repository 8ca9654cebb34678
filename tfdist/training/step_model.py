"""The Keras model around a step of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import ConfigError


class StepModel(keras.Model):
    """Runs a function as its training step.

    Args:
        function: Takes a batch, and returns logs.
        uses: Models, layers, optimizers, metrics, seed generators and variables that it uses.

    Attributes:
        logs: What the last step has returned.
    """

    def __init__(self, function: Callable[[Any], dict[str, Any]], uses: list[Any]):
        super().__init__(name=getattr(function, "__name__", "step"))
        self.uses = uses
        self.function = function
        self.logs: dict[str, Any] = {}

    def train_step(self, data: Any) -> dict[str, Any]:
        """Runs the function.

        Raises:
            ConfigError: It returns something other than logs.
        """
        logs = self.function(data)
        if not isinstance(logs, dict):
            raise ConfigError(
                f"The step {self.name!r} must return logs, a dict of names to numbers. Received: {type(logs).__name__}."
            )
        return logs
