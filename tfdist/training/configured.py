"""The process and the model that a configuration asks for, the same in tasks that train and in the evaluator."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Logs
from tfdist.cluster import task_versions
from tfdist.config import TrainConfig
from tfdist.config import callbacks as callbacks_lib
from tfdist.config import train as config_lib
from tfdist.errors import ConfigError, describe_error, format_value, unknown_name_message
from tfdist.monitoring import tensorboard, tracker
from tfdist.runtime.files import check_opens, write_error_reason
from tfdist.runtime.folders import storage
from tfdist.runtime.folders.temporary import temporary_folder
from tfdist.runtime.folders.workdir import Workdir
from tfdist.runtime.report.phase import phase
from tfdist.training import task_checks
from tfdist.training.trainer import Trainer

# Methods that determine the names of a model's metrics. If the user overrides one, the names are known after an epoch.
_OWN_METRICS = ("train_step", "test_step", "compute_metrics", "get_metrics_result")


def fix_threads(config: TrainConfig) -> None:
    """Limits operations to one thread if the run is deterministic, unless the user sets a number. Call it before the strategy is created.

    Sums depend on the number of threads, which is otherwise that of the machine's cores.
    """
    if config.deterministic:
        os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")  # read when TensorFlow starts its devices


def prepare_process(config: TrainConfig) -> None:
    """Sets the seed, determinism and precision of this process. Call it after the strategy and before the model is created."""
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.mixed_precision.set_dtype_policy(config.precision)


def load_initial_weights(config: TrainConfig, trainer: Trainer, model: keras.Model) -> None:
    """Loads `config.initial_weights`, if set, into a built model, on every rank. Raises ConfigError for a file that does not fit."""
    path = config.initial_weights
    if not path:
        return
    try:
        with local_copy(path) as local, trainer.scope():
            check_opens(local)
            model.load_weights(local)
    except Exception as e:  # readers raise many types for a file of another format
        raise ConfigError(
            f"initial_weights {path!r} cannot be loaded into model {model.name!r}: {describe_error(e).rstrip('.')}. Give a file of this model's weights, "
            "which every task can read."
        ) from e


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Yields the local path of a file: `path`, or a temporary copy of the file at a URL. Raises OSError if it cannot be read."""
    if not storage.is_url(path):
        yield path
        return
    with temporary_folder() as folder:
        local = os.path.join(folder, os.path.basename(path))
        storage.with_retries(lambda: storage.download(path, local))
        yield local


def save_model(workdir: Workdir, trainer: Trainer, model: keras.Model) -> None:
    """Saves the trained model in the work directory."""
    with phase("saving"):
        if trainer.is_chief:
            workdir.check_owner()
        trainer.save(model, os.path.join(workdir, "model.keras"), delete_backup=False)


class MonitoredMetrics(keras.callbacks.Callback):
    """A check that monitored metrics exist: raises ConfigError where Keras' callbacks would only warn.

    Put it before those callbacks. With `at_once` it checks the metrics of the training after the first step. It checks all metrics at the
    end of an epoch, because custom steps and callbacks may add metrics until then. `monitored` pairs callbacks' names with metrics.
    """

    only_observes = True

    def __init__(self, monitored: Iterable[tuple[str, str]], at_once: bool):
        super().__init__()
        self._missing = dict.fromkeys(monitored)
        self._at_once = at_once

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._at_once:
            return
        self._at_once = False
        has_custom_metrics = any(
            getattr(type(self.model), name, None) is not getattr(keras.Model, name, None) for name in _OWN_METRICS
        )
        if logs and not has_custom_metrics:
            known = [*logs, *(f"val_{name}" for name in logs), "learning_rate"]
            self._check([metric for _, metric in self._missing if metric not in known], known)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        logs = logs or {}
        validated = any(name.startswith("val_") for name in logs)
        later = {pair for pair in self._missing if pair[1].startswith("val_") and not validated}
        known = [*logs, "learning_rate"]
        due = [metric for name, metric in self._missing if (name, metric) not in later]
        self._check([metric for metric in due if metric not in known], known)
        self._missing = dict.fromkeys(later)

    def _check(self, missing: list[str], known: Iterable[str]) -> None:
        by = {metric: name for name, metric in self._missing}
        if missing:
            raise ConfigError(unknown_name_message(f"metric of callback {by[missing[0]]}", missing[0], known))


def checksum(config: TrainConfig) -> str:
    """Returns the checksum of the fields that must be equal on all tasks."""
    fields = {name: getattr(config, name) for name in ("epochs", "nan_policy", "callbacks", "initial_weights")}
    text = json.dumps({**config_lib.fixed(config), **fields}, default=str)
    return task_versions.checksum(text.encode())


def observers(config: TrainConfig, is_chief: bool, workdir: Workdir, batch_size: int) -> list[keras.callbacks.Callback]:
    """Creates the callbacks of a run that write files: curves, a tracker, and those of `build_callbacks`."""
    fields = config_lib.to_dict(config)
    options = {**config.monitoring.arguments(), "hparams": fields}
    callbacks = [tensorboard.TensorBoard(workdir.logs / "tensorboard", global_batch_size=batch_size, **options)]
    if config.monitoring.tracker:
        callbacks.append(tracker.Tracker(config.monitoring.tracker, fields))
    callbacks += build_callbacks(config, is_chief, workdir)
    if workdir.is_url:
        uploads = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: workdir.upload())
        uploads.only_observes = True
        callbacks.append(uploads)  # after those that write
    return callbacks


def build_callbacks(
    config: TrainConfig, is_chief: bool = True, workdir: Workdir | None = None
) -> list[keras.callbacks.Callback]:
    """Creates the callbacks of a configuration. If the work directory is at a URL, they may write files below the URL.

    Raises ConfigError if a callback cannot be created or, on the chief, cannot write its file.
    """
    callbacks: list[keras.callbacks.Callback] = []
    monitored = list(callbacks_lib.monitored(config.callbacks))
    if monitored:
        has_custom = any(":" in name for name, _ in callbacks_lib.parse(config.callbacks))
        callbacks.append(MonitoredMetrics(monitored, at_once=not has_custom))
    for name, arguments in callbacks_lib.parse(config.callbacks):
        make = callbacks_lib.resolve(name)
        written = {"CSVLogger": "filename", "ModelCheckpoint": "filepath"}.get(name, "")
        if written and storage.is_url(arguments[written]):
            arguments[written] = _local_path(arguments[written], workdir)
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
        if is_chief and written:
            path = arguments[written]
            why = _why_not_writable(path, name == "ModelCheckpoint")
            if why:
                raise ConfigError(
                    f"callbacks: {written} of {name} must be a file that can be written. Received: {format_value(path)} ({why})."
                )
        callbacks.append(callback)
    return callbacks


def _local_path(url: str, workdir: Workdir | None) -> str:
    path = workdir.local_path(url) if workdir else None
    if path is None:
        raise ConfigError(
            f"callbacks: Keras' callbacks write to local files. Received: {format_value(storage.shown(url))}. Give a local path, or one below "
            "the work directory, if --workdir is a URL."
        )
    return path


def _why_not_writable(path: str, is_pattern: bool) -> str:
    """Returns why a file cannot be written, or an empty text. Creates a missing file; for a pattern with placeholders creates only its folder."""
    if is_pattern:
        folder = os.path.dirname(path.partition("{")[0]) or "."
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as e:
            return write_error_reason(e)
        if not os.access(folder, os.W_OK):
            return os.strerror(errno.EACCES)
        return ""
    try:
        check_opens(path)
        with open(path, "ab"):
            return ""
    except (OSError, ValueError) as e:
        return write_error_reason(e)


def build_model(
    trainer: Trainer, config: TrainConfig, task: Any, optimizer: Callable[[], keras.optimizers.Optimizer]
) -> keras.Model:
    """Returns the task's model, built in the trainer's scope and compiled as configured."""
    with trainer.scope():
        model = task_checks.checked_model(config.task, task.build_model())
        task_arguments = task_checks.checked_compile_arguments(config.task, model, task.compile_arguments())
        arguments = {"jit_compile": config.jit_compile, "steps_per_execution": config.steps_per_execution}
        model.compile(**{"optimizer": optimizer(), **arguments, **task_arguments})
    return model
