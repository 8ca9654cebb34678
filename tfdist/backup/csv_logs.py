"""The files of `CSVLogger` callbacks, which go on where the backup was."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf


def csv_loggers(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.CSVLogger]:
    """Returns the callbacks that log to CSV files."""
    return [callback for callback in callbacks if isinstance(callback, keras.callbacks.CSVLogger)]


def cut_log(callback: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Removes the rows of the epochs that are trained again from a log that is open.

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
    with tf.io.gfile.GFile(callback.filename, "w") as file:
        file.write("".join(lines[:1] + list(filter(is_before, lines[1:]))))
    callback.on_train_begin()  # opens it again
