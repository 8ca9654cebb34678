"""The Keras optimizer of a configuration."""

from __future__ import annotations

import math
import re

import keras

from tfdist.config import TrainConfig, registry
from tfdist.config.optimizer import accumulation_fault
from tfdist.errors import ConfigError, describe_error, format_value
from tfdist.gradients import schedules


def build_optimizer(
    config: TrainConfig, replicas: int = 1, steps_per_epoch: int | None = None
) -> keras.optimizers.Optimizer:
    """Returns the Keras optimizer of `config`. The number of synchronous replicas may scale the learning rate.

    Raises:
        ConfigError: Keras has no such optimizer; the user's function raises an error or returns another object; or the schedule needs
            `steps_per_epoch`, which is None.
    """
    name = config.optimizer.name
    arguments = config.optimizer.arguments()
    scaling = {"none": 1, "linear": replicas, "sqrt": math.sqrt(replicas)}[config.learning_rate_scaling]
    rate = config.learning_rate * scaling
    accumulation = arguments.get("gradient_accumulation_steps") or 1
    if steps_per_epoch:
        fault = accumulation_fault(accumulation, steps_per_epoch * config.epochs)
        if fault:
            raise ConfigError(fault)
    arguments["learning_rate"] = schedules.build_schedule(
        config.schedule, rate, steps_per_epoch, config.epochs, accumulation
    )
    if ":" in name:
        make = registry.resolve("optimizer", name, {})
        try:
            optimizer = make(**arguments)
        except Exception as e:
            raise ConfigError(
                f"optimizer {name!r} raised an error when called with {format_value(sorted(arguments))}: {describe_error(e)}. It must accept these arguments."
            ) from e
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigError(
                f"optimizer {name!r} must return a keras.optimizers.Optimizer. Received: {format_value(optimizer)}."
            )
    else:
        # Not keras.optimizers.get, which does not know "lamb".
        kinds = {key.lower(): cls for key, cls in vars(keras.optimizers).items()}
        if name not in kinds:
            raise ConfigError(
                f"Keras {keras.__version__} has no optimizer {name!r}: install a newer one, or choose another optimizer."
            )
        optimizer = kinds[name](**arguments)
    names = config.optimizer.excluded_from_weight_decay()
    if names:
        optimizer.exclude_from_weight_decay(var_names=[re.escape(name) for name in names])
    if config.precision == "mixed_float16" and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # `compile` would wrap the optimizer, too, but the file that `save` writes would not contain the wrapper.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer
