"""Keras' loops under a strategy: `fit`, `evaluate`, `predict`, and single steps on a batch.

Each function takes Keras' method, or the one by which the model's class overrides it, and the arguments of the call.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backup.callback import BackupAndRestore
from tfdist.compat import unsupported
from tfdist.compat.keras_internals import BATCH_HOOKS
from tfdist.data import worker_rows
from tfdist.errors import stop_iteration_error
from tfdist.gradients.optimizer import skipped_updates
from tfdist.monitoring import TensorBoard
from tfdist.runtime.progress import Progress
from tfdist.step import execution
from tfdist.training import callback_kinds, callback_sync, checks, console, input_data
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
    arguments = input_data.bind_arguments(keras.Model.fit, method, model, args, kwargs)
    x = input_data.data_argument(method, arguments)
    data, validation = arguments.pop(x, None), arguments.pop("validation_data", None)
    for each in (data, validation):
        unsupported.check_data(context.strategy, each)
    input_data.check_own_rows(data, arguments)
    checks.check_class_weight(data, arguments.get("class_weight"))
    if context.ranks.size == 1:
        data = input_data.unpack_own_rows(data, arguments)
        if isinstance(validation, worker_rows.OwnRows):
            validation = (validation.x, validation.y, validation.sample_weight)
    with context.watching_workers():
        checks.check_consistency(context.ranks, model, data, validation, arguments)
        sizes = checks.own_sizes(context.ranks, data)
    global_batch_size = input_data.batch_size(data, arguments)
    if arguments.get("verbose", "auto") != 0:
        context.print_replicas(global_batch_size)
    described = {**arguments, "own_sizes": sizes}  # as a backup has them
    batch_size = arguments.get("batch_size")
    if isinstance(data, worker_rows.OwnRows):
        data = input_data.as_function(data, batch_size, arguments.pop("shuffle", True))
        arguments.pop("batch_size", None)
    validation = input_data.as_function(validation, arguments.get("validation_batch_size") or batch_size)
    steps, validation_steps = arguments.get("steps_per_epoch"), arguments.get("validation_steps")
    if isinstance(data, tf.data.Dataset) and input_data.ends_within_execution(model, steps):
        # Keras would count the steps that it does not run, and end before the data does.
        data = data.filter(lambda *_: True)
    if input_data.is_function(data) or isinstance(data, (tf.data.Dataset, types.GeneratorType)):
        arguments.setdefault("shuffle", False)  # or Keras warns that it will not shuffle
    callbacks = input_data.as_list(arguments.pop("callbacks", None))
    for each in callbacks:
        if isinstance(each, TensorBoard):
            each.fit_batch_size = global_batch_size
    class_weight = arguments.pop("class_weight", None) if input_data.is_function(data) else None
    limit = execution.StepLimit(steps, validation_steps)
    backup, callbacks, ends_with_fit = _choose_backup(context, callbacks)
    redirected = callback_kinds.redirect_to_temporary_files([] if context.is_chief else callbacks)
    with context.running(context.engine.running(model)), context.backing_up(backup, model, data, described), redirected:
        stops = [_NonFiniteStop()] if context.engine.nan_policy == "stop" else []
        callbacks = [limit, *stops, *_synchronized(context, callbacks)]
        callbacks += callback_kinds.guard_log_files(callbacks)
        if backup:
            if not any(isinstance(each, keras.callbacks.History) for each in callbacks):
                callbacks.append(keras.callbacks.History())  # or Keras would put it behind the backup
            backup.watch(callbacks)
            callbacks.append(backup)
            context.backup = None if ends_with_fit else backup
        else:
            callbacks.append(_ProgressReporter(context.task.name))
        if input_data.takes(method, "validation_data"):
            arguments["validation_data"] = _distribute(context, validation)
        run = functools.partial(
            method,
            model,
            **{x: _distribute(context, data, class_weight)},
            callbacks=callbacks,
            verbose=_verbosity(context, arguments),
            **arguments,
        )
        with _stop_iteration_as_error(callbacks):
            yield run
    if backup and ends_with_fit:
        context.delete_backup(backup)
    if context.is_chief:
        console.print_compression_faults(model)
        console.print_missing_update(model)


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
    arguments = input_data.bind_arguments(keras.Model.evaluate, method, model, args, kwargs)
    x = input_data.data_argument(method, arguments)
    unsupported.check_data(context.strategy, arguments.get(x))
    data = _own_as_function(context, arguments.pop(x, None), arguments, takes_targets=True)
    callbacks = [
        execution.StepLimit(None, arguments.get("steps")),
        *input_data.as_list(arguments.pop("callbacks", None)),
    ]
    with context.running(context.engine.running(model)), _stop_iteration_as_error(callbacks):
        return method(
            model,
            **{x: _distribute(context, data)},
            callbacks=callbacks,
            verbose=_verbosity(context, arguments),
            **arguments,
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
    arguments = input_data.bind_arguments(keras.Model.predict, method, model, args, kwargs)
    x = input_data.data_argument(method, arguments)
    data, steps = arguments.pop(x), arguments.get("steps")
    unsupported.check_data(context.strategy, data)
    own = worker_rows.is_own(data) and context.ranks.size > 1
    data = _own_as_function(context, data, arguments, takes_targets=False)
    if input_data.takes(method, "callbacks"):
        arguments["callbacks"] = [execution.StepLimit(), *input_data.as_list(arguments.pop("callbacks", None))]
    data = context.engine.data_to_predict(model, data, steps)
    guarded = _stop_iteration_as_error(arguments.get("callbacks", ()))
    with context.running(context.engine.predicting(model, steps)), guarded:
        data = _distribute(context, data)
        rows = (
            getattr(model.make_predict_function(), "own_rows", None) if own else None
        )  # a model may have a function of its own
        if rows:
            rows.clear()
        outputs = method(model, **{x: data}, verbose=_verbosity(context, arguments), **arguments)
        return input_data.order_by_worker(outputs, rows, context.ranks) if rows else outputs


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


def _choose_backup(
    context: LoopContext, callbacks: Sequence[keras.callbacks.Callback]
) -> tuple[BackupAndRestore | None, list[keras.callbacks.Callback], bool]:
    """Chooses what backs a `fit` up: the user's callback, the default, or one in place of Keras' own callback.

    Args:
        context: The context of the loop. Its backup, if there is one, is used if none of the callbacks backs up.
        callbacks: The user's.

    Returns:
        What backs up, or None; the other callbacks; whether the backup is to be removed when `fit` ends, as Keras' is.
    """
    own = [each for each in callbacks if isinstance(each, BackupAndRestore)]
    of_keras = [each for each in callbacks if isinstance(each, keras.callbacks.BackupAndRestore)]
    others = [each for each in callbacks if each not in (*own[:1], *of_keras)]
    backup = own[0] if own else context.backup
    if not of_keras:
        return backup, others, False
    if backup is not None:
        context.notify_once(
            f"left keras.callbacks.BackupAndRestore out, as the training is backed up in {backup.backup_dir!r}"
        )
        return backup, others, False
    keras_own = of_keras[0]
    folder = os.fspath(keras_own.backup_dir)
    context.notify_once(
        f"tfdist.BackupAndRestore({folder!r}) takes the place of keras.callbacks.BackupAndRestore, which repeats steps after a restart; "
        "a backup that Keras' has written is not read"
    )
    backup = BackupAndRestore(folder, keras_own.save_freq or "epoch", delete_checkpoint=keras_own.delete_checkpoint)
    return backup, others, keras_own.delete_checkpoint


def _synchronized(context: LoopContext, callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns the user's callbacks between those that keep the ranks in step. A collective."""
    checks.check_callbacks(callbacks)
    return callback_sync.wrap_callbacks(callbacks, context.strategy, context.ranks, context.check_weights)


class _NonFiniteStop(keras.callbacks.Callback):
    """Raises, for the policy `stop`, after a step whose loss or gradient is not finite. All ranks have the same of both."""

    def on_train_begin(self, logs: Any = None) -> None:
        self._skipped = self._count()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._done = epoch + 1, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        begun, self._done = self._done + 1, batch + 1
        loss = (logs or {}).get("loss", 0.0)
        gradient = self._count() > self._skipped
        if math.isfinite(loss) and not gradient:
            return
        steps = f"Step {begun}" if begun == batch + 1 else f"A step of {begun} to {batch + 1}"
        what = "the loss" if not math.isfinite(loss) else "a gradient"
        raise FloatingPointError(
            f"{steps} of epoch {self._epoch}: {what} is not finite, and nan_policy is 'stop'. Lower the learning rate, clip gradients, "
            "look at the batch, or leave such updates out by nan_policy='skip'."
        )

    def _count(self) -> int:
        return sum(int(number.numpy()) for number in skipped_updates(self.model))


class _ProgressReporter(keras.callbacks.Callback):
    """Reports step, epoch and metrics of a `fit` without backups to the supervisor; with backups, `BackupSession` reports them.

    Args:
        task: This task's name, as `worker-1`.
    """

    def __init__(self, task: str):
        super().__init__()
        self._progress = Progress(task)
        self._done = self._epoch = self._epoch_step = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._progress.write(done=0, saved=0, epoch=0, epochs=0, total=0)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        epochs, steps = self.params["epochs"], self.params["steps"]
        self._epoch, self._epoch_step = epoch + 1, 0
        total = self._done + (epochs - epoch) * steps if steps else 0
        self._progress.write(epoch=self._epoch, epochs=epochs, total=total)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = min(batch + 1, self.params["steps"] or batch + 1)  # Keras counts beyond them
        self._done, self._epoch_step = self._done + done - self._epoch_step, done
        self._progress.write(done=self._done, metrics=logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._progress.write(metrics=logs)  # those of the validation, too


def _own_as_function(context: LoopContext, data: Any, arguments: dict[str, Any], takes_targets: bool) -> Any:
    """Returns data that `evaluate` and `predict` take, once all workers have given the same, or declared their own. A collective."""
    input_data.check_own_rows(data, arguments)
    if context.ranks.size == 1:
        return input_data.unpack_own_rows(data, arguments if takes_targets else {})
    with context.watching_workers():
        checks.check_data_consistency(context.ranks, data, arguments)
    batch_size = arguments.pop("batch_size", None) if isinstance(data, worker_rows.OwnRows) else None
    return input_data.as_function(data, batch_size)


def _distribute(context: LoopContext, data: Any, class_weight: dict[int, float] | None = None) -> Any:
    return input_data.distribute(data, context.engine, class_weight)


def _verbosity(context: LoopContext, arguments: dict[str, Any]) -> str | int:
    """Takes `verbose` out of the arguments, and returns the one that Keras gets."""
    return console.verbosity(arguments.pop("verbose", "auto"), context.is_chief)


@contextlib.contextmanager
def _stop_iteration_as_error(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Makes callbacks' batch hooks raise a RuntimeError in place of StopIteration, in the loop that is called inside.

    Keras' loops would take StopIteration for the end of the data: an epoch would be cut short without an error.

    Args:
        callbacks: The callbacks, which are changed until then: a proxy in their place would hide their class.
    """
    changed = []
    try:
        for callback in callbacks:
            for name in BATCH_HOOKS:
                own = vars(callback).get(name)  # LambdaCallback has its hooks there
                if own is not None or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name):
                    changed.append((callback, name, own))
                    setattr(
                        callback,
                        name,
                        functools.partial(_call_hook, getattr(callback, name), type(callback).__name__, name),
                    )
        yield
    finally:
        for callback, name, own in reversed(changed):
            if own is None:
                delattr(callback, name)
            else:
                setattr(callback, name, own)


def _call_hook(hook: Callable[..., Any], kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return hook(*args, **kwargs)
    except StopIteration as e:
        raise stop_iteration_error(f"{kind}.{name}", e) from e
