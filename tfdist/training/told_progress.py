"""Tells the supervisor how far a `fit` is that is not backed up; a backup tells it itself."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.runtime.progress import Progress


class TellProgress(keras.callbacks.Callback):
    """Tells the step and the epoch, for the launcher's table and its messages.

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
        self._progress.write(done=self._done)
