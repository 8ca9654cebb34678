"""The Keras optimizer that a configuration asks for."""

from __future__ import annotations

import keras

from tfdist.config import TrainConfig, registry
from tfdist.errors import ConfigError, format_value


def build_optimizer(config: TrainConfig) -> keras.optimizers.Optimizer:
    """Returns the Keras optimizer that `config` asks for.

    Args:
        config: The configuration: `optimizer`, `learning_rate` and `precision` count.

    Raises:
        ConfigError: The function that `optimizer.name` names does not return an optimizer.
    """
    name = config.optimizer.name
    arguments = {"learning_rate": config.learning_rate, **config.optimizer.non_default_arguments()}
    if ":" in name:
        optimizer = registry.resolve("optimizer", name, {})(**arguments)
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigError(
                f"optimizer {name!r} must return a keras.optimizers.Optimizer. Received: {format_value(optimizer)}."
            )
    else:
        optimizer = keras.optimizers.get({"class_name": name, "config": arguments})
    if config.precision == "mixed_float16" and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # `compile` would wrap the optimizer, too, but the file that `save` writes would not say so.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer
