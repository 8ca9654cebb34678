"""Files of `CSVLogger` callbacks on a full disk: the training goes on without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.runtime.log import logger
from tfdist.runtime.write_errors import reason


def guard(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns what to add to the callbacks of a training, so that a row that cannot be written to a CSV log costs one warning."""
    loggers = [each for each in callbacks if isinstance(each, keras.callbacks.CSVLogger)]
    return [_Guard(loggers)] if loggers else []


class _Guard(keras.callbacks.Callback):
    only_observes = True

    def __init__(self, loggers: Sequence[keras.callbacks.CSVLogger]):
        super().__init__()
        self._loggers = loggers

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for each in self._loggers:  # which open their files as the training begins, and again after a restore
            if each.csv_file and not isinstance(each.csv_file, _OptionalFile):
                each.csv_file = _OptionalFile(each.csv_file, each.filename)


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

    def _try(self, action: Callable[..., Any], *arguments: Any) -> None:
        try:
            action(*arguments)
        except (OSError, tf.errors.OpError) as e:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    f"cannot write {self._path}: {reason(e)}; the training goes on, but rows of this log may be missing. Free the disk."
                )
