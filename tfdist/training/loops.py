"""Keras' loops under a strategy: `fit`, `evaluate`, `predict`, and single steps on a batch.

Each function takes Keras' method, or the one by which the model's class overrides it, and the arguments of the call.

`take_backup` finds the backup that a `fit` has: the Trainer's, a callback of tfdist's, or one in place of Keras' own callback.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backup.callback import BackupAndRestore
from tfdist.compat import unsupported
from tfdist.monitoring import TensorBoard
from tfdist.runtime.log import logger
from tfdist.step import execution
from tfdist.training import callback_kinds, callback_sync, checks, console, input_data, stop_iteration
from tfdist.training.loop_context import LoopContext
from tfdist.training.non_finite_stop import NonFiniteStop
from tfdist.training.told_progress import TellProgress

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
        ClusterError: As `training`.
        ConfigError: As `training`.
    """
    with training(context, method, model, args, kwargs) as run:
        run()
    return model.history


@contextlib.contextmanager
def training(
    context: LoopContext, method: Method, model: keras.Model, args: Any, kwargs: Any
) -> Iterator[Callable[[], Any]]:
    """Does what a training needs before and after its loop; the value runs the loop.

    Args:
        context: The context of the loop.
        method: The model's `fit`, or another loop that takes its arguments.
        model: The model, checked and attached.
        args: The arguments by position.
        kwargs: The arguments by name.

    Raises:
        ClusterError: A task is lost that the others cannot do without.
        ConfigError: Workers were given different arguments, or data that the strategy cannot use.
    """
    given = input_data.bind_arguments(keras.Model.fit, method, model, args, kwargs)
    x = input_data.data_argument(method, given)
    data, validation = given.pop(x, None), given.pop("validation_data", None)
    for each in (data, validation):
        unsupported.check_data(context.strategy, each)
    with context.watching_workers():
        checks.check_consistency(context.ranks, data, validation, given)
    if given.get("verbose", "auto") != 0:
        context.print_replicas(input_data.batch_size(data, given))
    steps, validation_steps = given.get("steps_per_epoch"), given.get("validation_steps")
    if isinstance(data, tf.data.Dataset) and input_data.ends_within_execution(model, steps):
        # Keras would count the steps that it does not run, and end before the data does.
        data = data.filter(lambda *_: True)
    if input_data.is_function(data) or isinstance(data, (tf.data.Dataset, types.GeneratorType)):
        given.setdefault("shuffle", False)  # or Keras warns that it will not shuffle
    callbacks = input_data.as_list(given.pop("callbacks", None))
    for each in callbacks:
        if isinstance(each, TensorBoard):
            each.fit_batch_size = input_data.batch_size(data, given)
    class_weight = given.pop("class_weight", None) if input_data.is_function(data) else None
    limit = execution.StepLimit(steps, validation_steps)
    backup, callbacks, ends_with_fit = take_backup(callbacks, context.backup)
    chiefs_files = callback_kinds.redirect_to_temporary_files([] if context.is_chief else callbacks)
    with context.running(context.engine.running(model)), context.backing_up(backup, model, data, given), chiefs_files:
        stops = [NonFiniteStop()] if context.engine.nan_policy == "stop" else []
        callbacks = [limit, *stops, *_synchronized(context, callbacks)]
        callbacks += callback_kinds.guard_log_files(callbacks)
        if backup:
            if not any(isinstance(each, keras.callbacks.History) for each in callbacks):
                callbacks.append(keras.callbacks.History())  # or Keras would put it behind the backup
            backup.watch(callbacks)
            callbacks.append(backup)
            context.backup = None if ends_with_fit else backup
        else:
            callbacks.append(TellProgress(context.task.name))
        if input_data.takes(method, "validation_data"):
            given["validation_data"] = _distribute(context, validation)
        run = functools.partial(
            method,
            model,
            **{x: _distribute(context, data, class_weight)},
            callbacks=callbacks,
            verbose=_verbosity(context, given),
            **given,
        )
        with stop_iteration.raised_as_error(callbacks):
            yield run
    if backup and ends_with_fit:
        context.delete_backup(backup)
    if context.is_chief:
        console.print_compression_faults(model)


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
    given = input_data.bind_arguments(keras.Model.evaluate, method, model, args, kwargs)
    x = input_data.data_argument(method, given)
    unsupported.check_data(context.strategy, given.get(x))
    callbacks = [execution.StepLimit(None, given.get("steps")), *input_data.as_list(given.pop("callbacks", None))]
    with context.running(context.engine.running(model)), stop_iteration.raised_as_error(callbacks):
        return method(
            model,
            **{x: _distribute(context, given.pop(x, None))},
            callbacks=callbacks,
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
    given = input_data.bind_arguments(keras.Model.predict, method, model, args, kwargs)
    x = input_data.data_argument(method, given)
    data, steps = given.pop(x), given.get("steps")
    unsupported.check_data(context.strategy, data)
    if input_data.takes(method, "callbacks"):
        given["callbacks"] = [execution.StepLimit(), *input_data.as_list(given.pop("callbacks", None))]
    data = context.engine.data_to_predict(model, data, steps)
    guarded = stop_iteration.raised_as_error(given.get("callbacks", ()))
    with context.running(context.engine.predicting(model, steps)), guarded:
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
    engine = context.engine
    with context.working(), engine.predicting(model, None) if name == "predict_on_batch" else engine.running(model):
        return method(model, *args, **kwargs)


LOOPS = {"fit": fit, "evaluate": evaluate, "predict": predict}


def _synchronized(context: LoopContext, callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns the user's callbacks between those that keep the ranks in step. A collective."""
    checks.check_callbacks(callbacks)
    return callback_sync.wrap_callbacks(callbacks, context.strategy, context.ranks, context.check_weights)


def _distribute(context: LoopContext, data: Any, class_weight: dict[int, float] | None = None) -> Any:
    return input_data.distribute(data, context.engine, class_weight)


def _verbosity(context: LoopContext, given: dict[str, Any]) -> str | int:
    """Takes `verbose` out of the arguments, and returns the one that Keras gets."""
    return console.verbosity(given.pop("verbose", "auto"), context.is_chief)


def take_backup(
    callbacks: Sequence[keras.callbacks.Callback], default: BackupAndRestore | None
) -> tuple[BackupAndRestore | None, list[keras.callbacks.Callback], bool]:
    """Takes what backs up out of a list of callbacks.

    Args:
        callbacks: The user's.
        default: What backs up if none of them does, or None.

    Returns:
        What backs up, or None; the other callbacks; whether the backup is to be removed when `fit` ends, as Keras' is.
    """
    given = [each for each in callbacks if isinstance(each, BackupAndRestore)]
    of_keras = [each for each in callbacks if isinstance(each, keras.callbacks.BackupAndRestore)]
    others = [each for each in callbacks if each not in (*given[:1], *of_keras)]
    backup = given[0] if given else default
    if not of_keras:
        return backup, others, False
    if backup is not None:
        logger.info(f"left keras.callbacks.BackupAndRestore out, as the training is backed up in {backup.backup_dir!r}")
        return backup, others, False
    keras_own = of_keras[0]
    folder = os.fspath(keras_own.backup_dir)
    logger.info(
        f"tfdist.BackupAndRestore({folder!r}) takes the place of keras.callbacks.BackupAndRestore, which repeats steps after a restart; "
        "a backup that Keras' has written is not read"
    )
    backup = BackupAndRestore(folder, keras_own.save_freq or "epoch", delete_checkpoint=keras_own.delete_checkpoint)
    return backup, others, keras_own.delete_checkpoint
