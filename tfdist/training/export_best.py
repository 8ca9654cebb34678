"""`ExportBest`: the best model so far, as a SavedModel that TensorFlow Serving loads."""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Logs
from tfdist.config.export import rises
from tfdist.errors import ConfigError, unknown_name_message
from tfdist.runtime.goodput import during
from tfdist.runtime.log import logger
from tfdist.strategies import model_methods, saving

_ABOUT = "assets.extra/tfdist.json"  # a SavedModel's folder for files of other programs
_PARTIAL = re.compile(r"\d+\.[0-9a-f]{8}\.partial")


class ExportBest(keras.callbacks.Callback):
    """A callback that exports the model for inference after each epoch in which a metric reaches its best value so far.

        trainer.fit(model, data, validation_data=validation, epochs=9, callbacks=[tfdist.ExportBest("models/digits")])

    Each export is a SavedModel in its own folder, `PATH/1`, `PATH/2` and so on; TensorFlow Serving loads the highest number in
    `PATH`. An export appears there complete, in one step; then earlier exports of this class are removed. Its file
    `assets.extra/tfdist.json` holds the epoch and the metrics. A training that resumes from a backup remembers the best
    value. A new training replaces the export of the previous training at the end of its first epoch.

    Give it to all workers or to the chief alone: the chief writes.

    Args:
        path: The folder.
        monitor: The metric's name in the logs of an epoch. For a `val_` metric, epochs without validation are skipped.
        mode: Whether the metric should fall (`"min"`) or rise (`"max"`); `"auto"` decides by the metric's name.

    Attributes:
        best: The metric's best value so far, or None. Values that are not finite do not count.

    Raises:
        ConfigError: The mode is unknown, `"auto"` cannot decide by the name, or the metric is missing after an epoch.

    Examples:
        >>> import tempfile, tfdist
        >>> callback = tfdist.ExportBest(tempfile.mkdtemp(), monitor="val_loss")
        >>> callback.monitor
        'val_loss'
    """

    writes = "path"

    def __init__(self, path: str | os.PathLike[str], monitor: str = "val_loss", mode: str = "auto"):
        super().__init__()
        self.path = os.fspath(path)
        self.monitor = monitor
        self.best: float | None = None
        self._rises = rises("monitor", monitor, "mode", mode)
        self._by = [monitor, "max" if self._rises else "min"]
        self._version: int | None = None  # the newest known version, of this training or an earlier one
        self._has_warned = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a backup."""
        return {"by": self._by, "best": self.best, "version": self._version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from `state_dict`, or from a later export of this training run."""
        if state["by"] != self._by:
            return  # values of another metric or mode do not compare
        self.best, self._version = state["best"], state["version"]
        newest = newest_version(self.path)
        if newest > state["version"] and (about := self._about(newest)) and about["by"] == self._by:
            self.best, self._version = about["metrics"][self.monitor], newest
            self._remove_others(newest)  # the process may have been killed before this removal

    def on_train_begin(self, logs: Logs = None) -> None:
        if self._version is None:
            self._version = newest_version(self.path)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        logs = logs or {}
        value = logs.get(self.monitor)
        if value is None:
            self._explain_absence(epoch, logs)
        elif math.isfinite(value) and (self.best is None or (value > self.best if self._rises else value < self.best)):
            self._export(epoch, {name: float(log) for name, log in logs.items() if np.ndim(log) == 0})
            self.best = float(value)

    def on_train_end(self, logs: Logs = None) -> None:
        if self.best is None:
            logger.warning(
                f"ExportBest has exported no model to {self.path}: {self.monitor} had no finite value after any epoch"
            )

    def _explain_absence(self, epoch: int, logs: dict[str, Any]) -> None:
        if not self.monitor.startswith("val_") or any(name.startswith("val_") for name in logs):
            raise ConfigError(unknown_name_message("metric of ExportBest", self.monitor, logs))
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"ExportBest waits for an epoch with validation, as it monitors {self.monitor!r}; epoch {epoch + 1} had only "
                f"{', '.join(sorted(logs))}"
            )

    def _export(self, epoch: int, metrics: dict[str, float]) -> None:
        version = max(newest_version(self.path), self._version or 0) + 1
        path = os.path.join(self.path, str(version))
        tf.io.gfile.makedirs(self.path)
        with during("saving"), saving.beside(path) as partial:
            saving.outside_of_scopes(model_methods.keras_own("export"), self.model, partial, verbose=False)
            tf.io.gfile.makedirs(os.path.dirname(os.path.join(partial, _ABOUT)))
            with tf.io.gfile.GFile(os.path.join(partial, _ABOUT), "w") as file:
                file.write(json.dumps({"by": self._by, "epoch": epoch + 1, "metrics": metrics}))
        self._version = version
        logger.info(f"exported the model of epoch {epoch + 1} ({self.monitor} {metrics[self.monitor]:.6g}) to {path}")
        self._remove_others(version)

    def _remove_others(self, version: int) -> None:
        """Removes this class's exports before `version`."""
        for name in _names(self.path):
            if name.isdecimal() and int(name) != version and self._about(name):
                # Rename it first: if this process ends during the removal, no incomplete model keeps a number.
                partial_path = f"{name}.{uuid.uuid4().hex[:8]}.partial"
                tf.io.gfile.rename(os.path.join(self.path, name), os.path.join(self.path, partial_path))
        for name in filter(_PARTIAL.fullmatch, _names(self.path)):
            tf.io.gfile.rmtree(os.path.join(self.path, name))

    def _about(self, version: int | str) -> dict[str, Any] | None:
        """Returns the description in an export; None if this class has not written it."""
        try:
            with tf.io.gfile.GFile(os.path.join(self.path, str(version), _ABOUT)) as file:
                return json.loads(file.read())
        except tf.errors.OpError:
            return None


def newest_version(path: str | os.PathLike[str]) -> int:
    """Returns the highest number that names a folder in `path`, or 0."""
    return max((int(name) for name in _names(path) if name.isdecimal()), default=0)


def _names(path: str | os.PathLike[str]) -> list[str]:
    return [name.rstrip("/") for name in tf.io.gfile.listdir(path)] if tf.io.gfile.isdir(path) else []
