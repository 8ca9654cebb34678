"""Keras' loops under a strategy: `fit`, `evaluate`, `predict`, and single steps on a batch.

Each function takes Keras' method, or the one by which the model's class overrides it, and the arguments of the call.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.backup.callback import BackupAndRestore
from tfdist.compat import unsupported
from tfdist.errors import ConfigError
from tfdist.step import execution
from tfdist.training import arguments, callback_sync, checks, consistency, console, file_callbacks, input_data
from tfdist.training.loop_context import LoopContext

Method = Callable[..., Any]


def fit(context: LoopContext, method: Method, model: keras.Model, args: Any, kwargs: Any) -> keras.callbacks.History:
    """Trains `model`, and returns its history.

    Args:
        context: The context of the loop.
        method: The model's `fit`.
        model: The model, checked and attached.
        args: The arguments by position.
        kwargs: The arguments by name.

    Raises:
        ClusterError: A task is lost that the others cannot do without.
        ConfigError: Workers were given different arguments, or data that the strategy cannot use.
    """
    given = arguments.bind_arguments(keras.Model.fit, method, model, args, kwargs)
    x = arguments.data_argument(method, given)
    data, validation = given.pop(x, None), given.pop("validation_data", None)
    for each in (data, validation):
        unsupported.check_data(context.strategy, each)
    with context.watching_workers():
        consistency.check_consistency(context.ranks, data, validation, given)
    if given.get("verbose", "auto") != 0:
        context.print_replicas(arguments.batch_size(data, given))
    steps, validation_steps = given.get("steps_per_epoch"), given.get("validation_steps")
    if isinstance(data, tf.data.Dataset) and arguments.ends_within_execution(model, steps):
        # Keras would count the steps that it does not run, and end before the data does.
        data = data.filter(lambda *_: True)
    if arguments.is_function(data) or isinstance(data, (tf.data.Dataset, types.GeneratorType)):
        given.setdefault("shuffle", False)  # or Keras warns that it will not shuffle
    class_weight = given.pop("class_weight", None) if arguments.is_function(data) else None
    limit = execution.StepLimit(steps, validation_steps)
    callbacks = arguments.as_list(given.pop("callbacks", None))
    backup = next((each for each in callbacks if isinstance(each, BackupAndRestore)), context.backup)
    chiefs_files = file_callbacks.redirect_to_temporary_files([] if context.is_chief else callbacks)
    with context.running(model), context.backing_up(backup, model, data, given), chiefs_files:
        callbacks = [limit, *_synchronized(context, [each for each in callbacks if each is not backup])]
        if backup:
            if not any(isinstance(each, keras.callbacks.History) for each in callbacks):
                callbacks.append(keras.callbacks.History())  # or Keras would put it behind the backup
            backup.watch(callbacks)
            callbacks.append(backup)
            context.backup = backup
        method(
            model,
            **{x: _distribute(context, data, class_weight)},
            callbacks=callbacks,
            validation_data=_distribute(context, validation),
            verbose=_verbosity(context, given),
            **given,
        )
    if context.is_chief:
        console.print_compression_faults(model)
    return model.history


def evaluate(context: LoopContext, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
    """Evaluates `model`, and returns what Keras' `evaluate` returns.

    Args:
        context: The context of the loop.
        method: The model's `evaluate`.
        model: The model, checked and attached.
        args: The arguments by position.
        kwargs: The arguments by name.

    Raises:
        ConfigError: The strategy cannot use the data.
    """
    given = arguments.bind_arguments(keras.Model.evaluate, method, model, args, kwargs)
    x = arguments.data_argument(method, given)
    unsupported.check_data(context.strategy, given.get(x))
    limit = execution.StepLimit(None, given.get("steps"))
    with context.running(model):
        return method(
            model,
            **{x: _distribute(context, given.pop(x, None))},
            callbacks=[limit, *arguments.as_list(given.pop("callbacks", None))],
            verbose=_verbosity(context, given),
            **given,
        )


def predict(context: LoopContext, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
    """Returns the outputs of `model` for all examples, in their order, on every rank.

    Args:
        context: The context of the loop.
        method: The model's `predict`.
        model: The model, checked and attached.
        args: The arguments by position.
        kwargs: The arguments by name.

    Raises:
        ConfigError: The strategy cannot use the data, or `steps` of data other than a dataset end within an execution.
    """
    given = arguments.bind_arguments(keras.Model.predict, method, model, args, kwargs)
    x = arguments.data_argument(method, given)
    data, steps = given.pop(x), given.get("steps")
    unsupported.check_data(context.strategy, data)
    if arguments.takes(method, "callbacks"):
        given["callbacks"] = [execution.StepLimit(), *arguments.as_list(given.pop("callbacks", None))]
    if context.coordinator:
        with context.working(), context.coordinator.predict_on_workers(model, steps):
            data = _distribute(context, data)
            return method(model, **{x: data}, verbose=_verbosity(context, given), **given)
    if isinstance(data, tf.data.Dataset):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        data = data.with_options(options)
        if arguments.ends_within_execution(model, steps):
            data = data.take(steps)
    elif arguments.ends_within_execution(model, steps):
        raise ConfigError(
            f"steps={steps} of predict must be a multiple of steps_per_execution={model.steps_per_execution} "
            "unless the data are a tf.data.Dataset."
        )
    with context.running(model):
        data = _distribute(context, data)
        return method(model, **{x: data}, verbose=_verbosity(context, given), **given)


def on_batch(context: LoopContext, name: str, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
    """Runs one step of `model`, as `train_on_batch`, `test_on_batch` and `predict_on_batch` do.

    Args:
        context: The context of the loop.
        name: The method's name.
        method: Keras' method.
        model: The model, checked and attached.
        args: The arguments by position.
        kwargs: The arguments by name.
    """
    if context.coordinator is None:
        return method(model, *args, **kwargs)
    runs = (
        context.coordinator.predict_on_workers(model, None)
        if name == "predict_on_batch"
        else context.coordinator.run_on_workers(model)
    )
    with context.working(), runs:
        return method(model, *args, **kwargs)


LOOPS = {"fit": fit, "evaluate": evaluate, "predict": predict}


def _synchronized(context: LoopContext, callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns the user's callbacks between those that keep the ranks in step. A collective."""
    checks.check_callbacks(callbacks, context.ranks.size)
    return callback_sync.wrap_callbacks(callbacks, context.strategy, context.ranks, context.check_weights)


def _distribute(context: LoopContext, data: Any, class_weight: dict[int, float] | None = None) -> Any:
    return input_data.distribute(data, context.strategy, context.coordinator, class_weight)


def _verbosity(context: LoopContext, given: dict[str, Any]) -> str | int:
    """Takes `verbose` out of the arguments, and returns the one that Keras gets."""
    return console.verbosity(given.pop("verbose", "auto"), context.is_chief)
