"""Tests for callbacks that only observe or only write, and temporary paths for the writers on workers.

A class declares itself by `only_observes = True` or `writes = "filepath"`. Keras' own classes do not, so tables here do it for them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Function, Logs
from tfdist.runtime.files import write_error_reason
from tfdist.runtime.folders.temporary import temporary_folder
from tfdist.runtime.log import logger

# These callbacks read each step's logs and the time. They change neither the model nor the training.
_KERAS_OBSERVERS = (keras.callbacks.TensorBoard, keras.callbacks.ProgbarLogger)
_KERAS_WRITERS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.RemoteMonitor: "root",
}
# Their files hold nothing of the model that may be in parts on the workers.
_LOGGERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)
_NO_SERVER = "no address (of the workers, the chief alone sends)"


def only_observes(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback changes nothing that ranks must agree on."""
    return type(callback) in _KERAS_OBSERVERS or getattr(callback, "only_observes", False)


def only_writes(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback has all its hooks from a class that declares where it writes."""
    kind, _ = _writer(callback)
    if kind is None:
        return False
    hooks = [name for name in dir(kind) if name.startswith("on_") or name == "set_model"]
    return all(name not in vars(callback) and getattr(type(callback), name) is getattr(kind, name) for name in hooks)


def only_logs(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback only observes, or only writes with a logger of Keras."""
    return only_observes(callback) or (only_writes(callback) and isinstance(callback, _LOGGERS))


def place_attribute(callback: keras.callbacks.Callback) -> str | None:
    """Returns the name of the attribute that holds a callback's output path, or None if its classes declare none."""
    return _writer(callback)[1]


def _writer(callback: keras.callbacks.Callback) -> tuple[type | None, str | None]:
    """Returns the most derived class of a callback that declares where it writes, and the declared attribute's name."""
    kinds = type(callback).__mro__
    for kind, declared in ((kinds[0], vars(callback)), *((kind, vars(kind)) for kind in kinds)):
        name = declared.get("writes", _KERAS_WRITERS.get(kind))
        if isinstance(name, str):
            return kind, name
    return None, None


@contextlib.contextmanager
def redirect_to_temporary_files(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Redirects writers to a temporary folder within the context, then restores their paths and removes the folder.

    For workers: a subclass that predicts in a hook must run on all of them, but their files would overwrite the chief's.
    """
    writers = []
    for callback in callbacks:
        name = place_attribute(callback)
        if name is None:
            continue
        path = getattr(callback, name, None)
        if isinstance(path, (str, pathlib.PurePath)):  # None means that the callback does not write
            writers.append((callback, name, path))
    if not writers:
        yield
        return
    with temporary_folder() as folder:
        for number, (callback, name, path) in enumerate(writers):
            setattr(callback, name, _redirect(path, os.path.join(folder, str(number))))
        try:
            yield
        finally:
            for callback, name, path in writers:
                setattr(callback, name, path)


def _redirect(path: str | pathlib.PurePath, folder: str) -> str | pathlib.Path:
    """Creates `folder` and returns the path in it that replaces `path`. Replaces the URL of a server by `_NO_SERVER`."""
    if str(path).startswith(("http://", "https://")):
        return _NO_SERVER
    os.mkdir(folder)
    file = os.path.join(folder, os.path.basename(path))
    if isinstance(path, str):
        return file
    return pathlib.Path(file)


def guard_log_files(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns callbacks to add, so that an unwritable CSV log causes one warning and no error."""
    loggers = [callback for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]
    if not loggers:
        return []
    return [_LogFileGuard(loggers)]


class _LogFileGuard(keras.callbacks.Callback):
    only_observes = True

    def __init__(self, loggers: Sequence[keras.callbacks.CSVLogger]):
        super().__init__()
        self._loggers = loggers

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        for log in self._loggers:  # CSVLogger opens its file when training begins, and again after a restore
            if log.csv_file and not isinstance(log.csv_file, _OptionalFile):
                log.csv_file = _OptionalFile(log.csv_file, log.filename)


class _OptionalFile:
    """A file that logs one warning, and raises no error, if it cannot be written."""

    def __init__(self, file: Any, path: str):
        self._file = file
        self._path = path
        self._has_warned = False

    def write(self, text: str) -> None:
        self._try(self._file.write, text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def close(self) -> None:
        self._try(self._file.close)

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def _try(self, action: Function, *arguments: Any) -> None:
        try:
            action(*arguments)
        except (OSError, tf.errors.OpError) as e:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    f"cannot write {self._path}: {write_error_reason(e)}; the training goes on, but rows of this log may be missing. Free the disk."
                )
