"""The files of `CSVLogger` callbacks, which go on where the backup was."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.runtime.log import logger
from tfdist.runtime.write_errors import reason


def csv_loggers(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.CSVLogger]:
    """Returns the callbacks that log to CSV files."""
    return [callback for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]


def cut_log(callback: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Removes the rows of the epochs that are trained again from a log that is open; where that fails, the log stays whole.

    Args:
        callback: The callback that writes the log.
        epoch: The first epoch that is trained again.
    """

    def is_before(line: str) -> bool:
        first = line.split(callback.sep)[0]
        return first.isdecimal() and int(first) < epoch

    callback.csv_file.flush()
    with tf.io.gfile.GFile(callback.filename) as file:
        lines = file.read().splitlines(keepends=True)
    kept = lines[:1] + list(filter(is_before, lines[1:]))
    if kept == lines:
        return
    partial = f"{callback.filename}.partial"
    try:
        with tf.io.gfile.GFile(partial, "w") as file:
            file.write("".join(kept))
        tf.io.gfile.rename(partial, callback.filename, overwrite=True)
    except (OSError, tf.errors.OpError) as e:
        logger.warning(
            f"cannot write {callback.filename}: {reason(e)}; the training goes on, but rows of epochs that it repeats are there twice. "
            "Free the disk."
        )
        with contextlib.suppress(OSError, tf.errors.OpError):
            tf.io.gfile.remove(partial)
        return
    callback.on_train_begin()  # opens it again
