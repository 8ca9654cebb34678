"""Preparation and end of the Trainer's loops: checks, agreement of the ranks, callbacks, backups. The loops are in `loop.py`."""

from __future__ import annotations

import contextlib
import math
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Data, Function, Logs, Structure
from tfdist.backup.callback import BackupAndRestore
from tfdist.compat import call_stack, unsupported
from tfdist.data import python_items, worker_rows
from tfdist.engine import Engine
from tfdist.errors import ClusterError
from tfdist.gradients import local_steps
from tfdist.gradients.finite_updates import skipped_updates
from tfdist.monitoring import TensorBoard, compression_report
from tfdist.monitoring.slow_tasks import SlowTasks
from tfdist.runtime.log import logger
from tfdist.runtime.report import kubeflow, progress
from tfdist.runtime.report.phase import phase
from tfdist.training import (
    callback_kinds,
    callback_sync,
    checks,
    console,
    input_data,
    keras_distribution,
    loop,
    saving,
    single_steps,
)
from tfdist.training.loop_context import LoopContext

Method = Function


def run(context: LoopContext, name: str, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
    """Runs a method of an attached model with the checks, callbacks and backups of a Trainer.

    `method` is Keras' own, which defines the names of the arguments. Raises ClusterError if a task is lost that the others need. Raises
    ConfigError if the workers' arguments differ, or if the strategy cannot use the data.
    """
    arguments = input_data.bind_arguments(method, model, args, kwargs)
    try:
        if name in LOOPS:
            with phase("call", name):
                return LOOPS[name](context, model, arguments)
        with context.stepping(model):
            return _PLAIN[name](context.engine, model, **arguments)
    except ClusterError as e:
        if progress.shown_cause(e):
            raise
        # In a terminal the frames of Keras and TensorFlow would hide the message, and the user's own lines.
        raise e.with_traceback(call_stack.without_packages(e.__traceback__))  # noqa: B904 (the same error)


def run_plain(engine: Engine, name: str, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
    """Runs a method of a model without the Trainer's checks and callbacks: without a Trainer, or when its loop calls the method. Takes the arguments of `run`."""
    return _PLAIN[name](engine, model, **input_data.bind_arguments(method, model, args, kwargs))


def fit(context: LoopContext, model: keras.Model, arguments: dict[str, Any]) -> keras.callbacks.History:
    with training(context, model, arguments) as surroundings:
        return loop.fit(surroundings, model, **arguments)


@contextlib.contextmanager
def training(context: LoopContext, model: keras.Model, arguments: dict[str, Any]) -> Iterator[loop.Surroundings]:
    """Prepares training and finishes it after its loop. Changes the arguments of `fit` to those of the loop."""
    data = arguments.pop("x", None)
    validation = arguments.pop("validation_data", None)
    for dataset in (data, validation):
        unsupported.check_data(context.strategy, dataset)
    input_data.check_own_rows(data, arguments)
    has_parts = context.strategy.batches_are_parts and context.ranks.size > 1
    if has_parts:
        data, validation = keras_distribution.as_own_data(data, validation, arguments, context.ranks.size)
    checks.check_class_weight(data, arguments.get("class_weight"))
    if context.ranks.size == 1:
        data = input_data.unpack_own_rows(data, arguments)
        if isinstance(validation, worker_rows.OwnRows):
            validation = (validation.x, validation.y, validation.sample_weight)
    # The comparison is a collective: without the watch it would wait for a worker that has ended.
    with context.watching_workers(), phase("call", "the comparison of its arguments"):
        checks.check_consistency(context.ranks, model, data, validation, arguments)
        sizes = checks.own_sizes(context.ranks, data)
    global_batch_size = input_data.batch_size(data, arguments)
    # A dataset that is sharded already has batches of the worker's part; of arrays, `as_own_data` has set the global size.
    if global_batch_size and has_parts and isinstance(data, tf.data.Dataset):
        global_batch_size *= context.ranks.size
    if arguments.get("verbose", "auto") != 0:
        context.print_replicas(global_batch_size, python_items.by_items(data))
    described = {**arguments, "own_sizes": sizes}  # as a backup stores them
    batch_size = arguments.get("batch_size")
    if isinstance(data, worker_rows.OwnRows):
        data = input_data.as_function(data, batch_size, arguments.pop("shuffle", True))
        arguments.pop("batch_size", None)
    validation = input_data.as_function(validation, arguments.get("validation_batch_size") or batch_size)
    if input_data.is_function(data) or isinstance(data, (tf.data.Dataset, types.GeneratorType)):
        arguments.setdefault("shuffle", False)  # with True Keras warns that it will not shuffle
    callbacks = input_data.as_list(arguments.pop("callbacks", None))
    for callback in callbacks:
        if isinstance(callback, TensorBoard):
            callback.fit_batch_size = global_batch_size
    backup, callbacks, ends_with_fit = _choose_backup(context, callbacks)
    redirected = callback_kinds.redirect_to_temporary_files(() if context.is_chief else callbacks)
    backing_up = context.backing_up(backup, model, data, described)
    # The backup is inside of `running`, which watches the workers: all ranks read and save backups together.
    posting = kubeflow.posting() if context.is_chief else contextlib.nullcontext()
    with context.running(model), backing_up as session, redirected, posting:
        # `save` after the training removes the backup, unless this function has removed it before.
        if backup:
            context.backup = None if ends_with_fit else backup
        if validation is not None:
            arguments["validation_data"] = validation
        console.set_verbosity(arguments, context.is_chief)
        arguments |= {"x": data, "callbacks": _in_order(context, model, callbacks)}
        yield loop.Surroundings(context.engine, session, reports=True)
    if backup and ends_with_fit:
        context.delete_backup(backup)
    if context.is_chief:
        for fault in compression_report.faults(model):
            logger.warning(fault)
        console.print_missing_update(model)


def evaluate(context: LoopContext, model: keras.Model, arguments: dict[str, Any]) -> Logs:
    unsupported.check_data(context.strategy, arguments.get("x"))
    data = _own_as_function(context, _own_data(context, arguments), arguments, takes_targets=True)
    console.set_verbosity(arguments, context.is_chief)
    with context.running(model):
        return loop.evaluate(context.engine, model, data, **arguments)


def predict(context: LoopContext, model: keras.Model, arguments: dict[str, Any]) -> Structure:
    """Returns the outputs for all examples, in their order, on every rank."""
    unsupported.check_data(context.strategy, arguments["x"])
    data = _own_data(context, arguments)
    has_own_rows = worker_rows.is_own(data) and context.ranks.size > 1
    data = context.engine.data_to_predict(model, _own_as_function(context, data, arguments, takes_targets=False))
    console.set_verbosity(arguments, context.is_chief)
    with context.running(model):
        model.make_predict_function()
        # A custom predict function of the model has no `own_rows`.
        rows = getattr(model.predict_function, "own_rows", [])
        rows.clear()  # those of the last prediction
        outputs = loop.predict(context.engine, model, data, **arguments)
        if not has_own_rows or not rows:
            return outputs
        return input_data.order_by_worker(outputs, rows, context.ranks)


LOOPS = {"fit": fit, "evaluate": evaluate, "predict": predict}
_PLAIN: dict[str, Any] = {
    "fit": lambda engine, model, **arguments: loop.fit(loop.Surroundings(engine), model, **arguments),
    "evaluate": loop.evaluate,
    "predict": loop.predict,
    **single_steps.METHODS,
}


def _choose_backup(
    context: LoopContext, callbacks: Sequence[keras.callbacks.Callback]
) -> tuple[BackupAndRestore | None, list[keras.callbacks.Callback], bool]:
    """Chooses the backup of a `fit`: the user's callback, the trainer's backup, or one in place of Keras' own callback.

    Returns the backup or None, the other callbacks, and whether to remove the backup when `fit` ends, as Keras' callback does.
    """
    ours = [callback for callback in callbacks if isinstance(callback, BackupAndRestore)]
    of_keras = [callback for callback in callbacks if isinstance(callback, keras.callbacks.BackupAndRestore)]
    others = [callback for callback in callbacks if callback not in (*ours[:1], *of_keras)]
    backup = context.backup
    if ours:
        backup = ours[0]
    if not of_keras:
        return backup, others, False
    if backup is not None:
        context.notify_once(
            f"skipped keras.callbacks.BackupAndRestore, because the training is backed up in {backup.backup_dir!r}"
        )
        return backup, others, False
    keras_backup = of_keras[0]
    folder = os.fspath(keras_backup.backup_dir)
    context.notify_once(
        f"tfdist.BackupAndRestore({folder!r}) replaces keras.callbacks.BackupAndRestore, which repeats steps after a restart; "
        "a backup that Keras' callback has written is not read"
    )
    backup = BackupAndRestore(
        folder, keras_backup.save_freq or "epoch", delete_checkpoint=keras_backup.delete_checkpoint
    )
    return backup, others, keras_backup.delete_checkpoint


def _in_order(
    context: LoopContext, model: keras.Model, callbacks: list[keras.callbacks.Callback]
) -> list[keras.callbacks.Callback]:
    """Returns all callbacks of a training, in the order in which they must be called. A collective."""
    checks.check_callbacks(callbacks)
    checks.check_averages(callbacks, context.strategy)
    in_parts = saving.may_be_in_parts(context, model)
    context.callbacks_differ = in_parts and callback_sync.differ(callbacks, context.ranks)
    if in_parts:
        checks.check_savers(callbacks, context.ranks, context.callbacks_differ)
    synchronize, own, agree = callback_sync.wrap_callbacks(
        callbacks, context.strategy, context.ranks, context.check_weights, in_parts
    )
    stop: list[keras.callbacks.Callback] = []
    if context.engine.nan_policy == "stop":
        stop.append(_NonFiniteStop())
    return [
        synchronize,  # before any callback reads the model
        *stop,  # raises before a callback saves weights that are not finite
        SlowTasks(context.engine, context.is_chief),  # before TensorBoard, which writes what it measures
        *own,
        agree,  # after the last one that may stop the training, or change the learning rate
        *callback_kinds.guard_log_files(own),  # once the loggers have opened their files
    ]


class _NonFiniteStop(keras.callbacks.Callback):
    """The policy `stop`: raises FloatingPointError after a step whose loss or gradient is not finite.

    All ranks have equal losses and gradients. With `sync_every` they agree on the gradients at each exchange, of which the last is at the end.
    """

    def on_train_begin(self, logs: Logs = None) -> None:
        self._skipped = self._count()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch + 1
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        first = self._done + 1
        last = batch + 1
        self._done = last
        loss = (logs or {}).get("loss", 0.0)
        gradient = self._count() > self._skipped
        if math.isfinite(loss) and not gradient:
            return
        self._raise(first, last, "a gradient" if math.isfinite(loss) else "the loss")

    def on_train_end(self, logs: Logs = None) -> None:
        if self._count() > self._skipped:
            self._raise(1, self._done, "a gradient")

    def _raise(self, first: int, last: int, what: str) -> None:
        # An execution of several steps has the logs of its last one.
        steps = f"Step {last}" if first == last else f"A step of {first} to {last}"
        raise FloatingPointError(
            f"{steps} of epoch {self._epoch}: {what} is not finite, and nan_policy is 'stop'. Lower the learning rate, clip gradients, "
            "check the batch, or skip such updates by nan_policy='skip'."
        )

    def _count(self) -> int:
        counts = [local.skipped for local in local_steps.of_model(self.model)] or skipped_updates(self.model)
        return sum(int(count.numpy()) for count in counts)


def _own_data(context: LoopContext, arguments: dict[str, Any]) -> Data:
    """Removes `x` from the arguments of `evaluate` or `predict`, and returns it, as each worker's own with `auto_shard_dataset=False`."""
    data = arguments.pop("x", None)
    input_data.check_own_rows(data, arguments)
    if context.strategy.batches_are_parts and context.ranks.size > 1:
        data, _ = keras_distribution.as_own_data(data, None, arguments, context.ranks.size)
    return data


def _own_as_function(context: LoopContext, data: Data, arguments: dict[str, Any], takes_targets: bool) -> Data:
    """Returns data for `evaluate` and `predict`, after a check that all workers pass the same data or their own rows. A collective."""
    if context.ranks.size == 1:
        targets = arguments if takes_targets else {}
        return input_data.unpack_own_rows(data, targets)
    with context.watching_workers():
        checks.check_data_consistency(context.ranks, data, arguments)
    if not isinstance(data, worker_rows.OwnRows):
        return data
    return input_data.as_function(data, arguments.pop("batch_size", None))
