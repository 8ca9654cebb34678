"""TensorBoard scalars."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.monitoring.throughput import Throughput


class Scalars(keras.callbacks.Callback):
    """Writes each epoch's metrics and throughput for TensorBoard.

    Args:
        log_dir: The run's folder; one writer only may write to it.
        throughput: Whose `examples_per_second` to write.
    """

    only_observes = True  # so that the chief alone may have it

    def __init__(self, log_dir: str | os.PathLike[str], throughput: Throughput):
        super().__init__()
        self._writer = tf.summary.create_file_writer(os.fspath(log_dir))
        self._throughput = throughput

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        values = {**(logs or {}), "examples_per_second": self._throughput.examples_per_second}
        with self._writer.as_default():
            for name, value in values.items():
                if value is not None and np.ndim(value) == 0:
                    tf.summary.scalar(name, float(value), step=epoch)

    def on_train_end(self, logs: Any = None) -> None:
        self._writer.close()
