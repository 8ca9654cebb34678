"""Callbacks that only observe or only write: how they are recognized, and where the writers may write.

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
from tfdist.runtime.log import logger
from tfdist.runtime.temporary import temporary_folder

# They look at each step's logs and clock, and touch neither the model nor its training.
_KERAS_OBSERVERS = (keras.callbacks.TensorBoard, keras.callbacks.ProgbarLogger)
_KERAS_WRITERS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.RemoteMonitor: "root",
}
_NO_SERVER = "no address (of the workers, the chief alone sends)"


def only_observes(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback changes nothing that ranks must agree on."""
    return type(callback) in _KERAS_OBSERVERS or getattr(callback, "only_observes", False)


def only_writes(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback is of a class that says where it writes, or of a subclass that overrides none of its hooks."""
    kind, _ = _writer(callback)
    if kind is None:
        return False
    hooks = [name for name in dir(kind) if name.startswith("on_") or name == "set_model"]
    return all(name not in vars(callback) and getattr(type(callback), name) is getattr(kind, name) for name in hooks)


def place_attribute(callback: keras.callbacks.Callback) -> str | None:
    """Returns the name of the attribute that says where a callback writes, or None if it says nothing of that."""
    return _writer(callback)[1]


def _writer(callback: keras.callbacks.Callback) -> tuple[type | None, str | None]:
    """Returns the first of a callback's classes that says where it writes, and the name of that attribute."""
    kinds = type(callback).__mro__
    for kind, declared in ((kinds[0], vars(callback)), *((kind, vars(kind)) for kind in kinds)):
        name = declared.get("writes", _KERAS_WRITERS.get(kind))
        if isinstance(name, str):
            return kind, name
    return None, None


@contextlib.contextmanager
def redirect_to_temporary_files(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Lets writers write to a temporary folder, which is removed in the end; then they have their own places again.

    For the workers: a subclass that predicts in a hook must do so on all of them, but their files would be the chief's.
    """
    places = [
        (each, name, place)
        for each in callbacks
        if (name := place_attribute(each)) and isinstance(place := getattr(each, name, None), (str, pathlib.PurePath))
    ]  # None means that it does not write
    if not places:
        yield
        return
    with temporary_folder() as folder:
        for number, (callback, name, place) in enumerate(places):
            setattr(callback, name, _redirect(place, os.path.join(folder, str(number))))
        try:
            yield
        finally:
            for callback, name, place in places:
                setattr(callback, name, place)


def _redirect(place: str | pathlib.PurePath, folder: str) -> str | pathlib.Path:
    """Returns a place in `folder`, which it creates, instead of `place`; instead of a server's address, none."""
    if str(place).startswith(("http://", "https://")):
        return _NO_SERVER
    os.mkdir(folder)
    file = os.path.join(folder, os.path.basename(place))
    return file if isinstance(place, str) else pathlib.Path(file)


def guard_log_files(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns callbacks to add, so that a row that cannot be written to a CSV log costs one warning."""
    loggers = [callback for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]
    return [_LogFileGuard(loggers)] if loggers else []


class _LogFileGuard(keras.callbacks.Callback):
    only_observes = True

    def __init__(self, loggers: Sequence[keras.callbacks.CSVLogger]):
        super().__init__()
        self._loggers = loggers

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        for log in self._loggers:  # which open their files as the training begins, and again after a restore
            if log.csv_file and not isinstance(log.csv_file, _OptionalFile):
                log.csv_file = _OptionalFile(log.csv_file, log.filename)


class _OptionalFile:
    """A file whose writer does not learn that it cannot be written."""

    def __init__(self, file: Any, path: str):
        self._file, self._path = file, path
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
