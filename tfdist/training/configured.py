"""The process and the model that a configuration asks for, the same in tasks that train and in the evaluator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.config import TrainConfig
from tfdist.config import callbacks as callbacks_lib
from tfdist.errors import ConfigError, describe_error, format_value
from tfdist.training.trainer import Trainer


def prepare_process(config: TrainConfig) -> None:
    """Sets the seed, the determinism and the precision of this process, once there is a strategy and before there is a model."""
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.mixed_precision.set_dtype_policy(config.precision)


def load_initial_weights(config: TrainConfig, trainer: Trainer, model: keras.Model) -> None:
    """Gives a model the weights with which a configuration begins, on every rank.

    Args:
        config: The configuration.
        trainer: Of the model.
        model: The model, built.

    Raises:
        ConfigError: The file cannot be read, or is another model's.
    """
    if not (path := config.initial_weights):
        return
    try:
        with trainer.scope():
            model.load_weights(path)
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(
            f"initial_weights {path!r} cannot be loaded into model {model.name!r}: {describe_error(e)} Give a file of this model's weights, "
            "which every task can read."
        ) from e


def build_callbacks(config: TrainConfig) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a configuration names.

    Args:
        config: The configuration.

    Raises:
        ConfigError: One of one's own is not there, one cannot be made of its arguments, or is no callback.
    """
    made = []
    for name, arguments in callbacks_lib.parse(config.callbacks):
        make = callbacks_lib.resolve(name)
        try:
            callback = make(**arguments)
        except Exception as e:
            raise ConfigError(
                f"callback {name!r} cannot be made of {format_value(arguments)}: {describe_error(e)}."
            ) from e
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigError(
                f"callback {name!r} must return a keras.callbacks.Callback. Received: {format_value(callback)}."
            )
        made.append(callback)
    return made


def build_model(
    trainer: Trainer, config: TrainConfig, task: Any, optimizer: Callable[[], keras.optimizers.Optimizer]
) -> keras.Model:
    """Returns the task's model, compiled as configured.

    Args:
        trainer: In whose scope.
        config: The configuration.
        task: The task.
        optimizer: Makes the optimizer.
    """
    with trainer.scope():
        model = task.build_model()
        arguments = {"jit_compile": config.jit_compile, "steps_per_execution": config.steps_per_execution}
        model.compile(optimizer=optimizer(), **{**arguments, **task.compile_arguments()})
    return model
