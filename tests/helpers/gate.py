"""A callback that holds a training until its test has done what it does amid it: the test may come late on a busy machine."""

from __future__ import annotations

import pathlib
import time

import keras

_LONGEST_WAIT = 120.0  # seconds: the test may be gone


class Gate(keras.callbacks.Callback):
    """Waits before an epoch until a file is there.

    Args:
        path: The file.
        epoch: Before which epoch, from 1.
    """

    def __init__(self, path: str, epoch: int):
        super().__init__()
        self._path, self._epoch = pathlib.Path(path), epoch

    def on_epoch_begin(self, epoch, logs=None):
        ends = time.monotonic() + _LONGEST_WAIT
        while epoch + 1 >= self._epoch and not self._path.exists() and time.monotonic() < ends:
            time.sleep(0.02)


def flag(path: pathlib.Path, epoch: int) -> str:
    """Returns the flag that puts a gate before an epoch."""
    return f"--config.callbacks=tests.helpers.gate:Gate(path={str(path)!r}, epoch={epoch})"
