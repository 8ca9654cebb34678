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

from tfdist.aliases import Logs
from tfdist.config.export import rises
from tfdist.errors import ConfigError, unknown_name_message
from tfdist.runtime.files import WriteError, write_error_reason, write_file
from tfdist.runtime.folders import storage
from tfdist.runtime.log import logger
from tfdist.runtime.report.phase import phase
from tfdist.strategies import model_methods, saving

_ABOUT = "assets.extra/tfdist.json"  # a SavedModel's folder for files of other programs
_PARTIAL = re.compile(r"\d+\.[0-9a-f]{8}\.partial")


class ExportBest(keras.callbacks.Callback):
    """A callback that exports the model for inference after each epoch in which a metric reaches its best value so far.

        trainer.fit(model, data, validation_data=validation, epochs=9, callbacks=[tfdist.ExportBest("models/digits")])

    Each export is a SavedModel in its own folder, `PATH/1`, `PATH/2` and so on; TensorFlow Serving loads the highest number in
    `PATH`. An export appears there complete, in one step; at a URL its `saved_model.pb` appears last. Then earlier exports of this class are removed. Its file
    `assets.extra/tfdist.json` holds the epoch and the metrics. A training that resumes from a backup remembers the best
    value. A new training replaces the export of the previous training at the end of its first epoch.

    Give it to all workers or to the chief alone: the chief writes.

    Args:
        path: The folder, or its URL (`s3://bucket/models`).
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
        mode = "max" if self._rises else "min"
        self._by = [monitor, mode]
        self._version: int | None = None  # the newest known version, of this training or an earlier one
        self._has_warned = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a backup."""
        return {"by": self._by, "best": self.best, "version": self._version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from `state_dict`, or from a later export of this training run."""
        if state["by"] != self._by:
            return  # values of another metric or mode do not compare
        self.best = state["best"]
        self._version = state["version"]
        newest = newest_version(self.path)
        if newest <= state["version"]:
            return
        # The interrupted run has exported after its last backup. It may have been killed before it removed the earlier exports.
        about = self._about(newest)
        if about and about["by"] == self._by:
            self.best = about["metrics"][self.monitor]
            self._version = newest
            self._remove_others(newest)

    def on_train_begin(self, logs: Logs = None) -> None:
        if self._version is None:
            self._version = newest_version(self.path)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        logs = logs or {}
        value = logs.get(self.monitor)
        if value is None:
            self._explain_absence(epoch, logs)
        elif math.isfinite(value) and self._is_best(value):
            self._export(epoch, {name: float(log) for name, log in logs.items() if np.ndim(log) == 0})
            self.best = float(value)

    def _is_best(self, value: float) -> bool:
        if self.best is None:
            return True
        if self._rises:
            return value > self.best
        return value < self.best

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
        saving.make_folder(path)
        with phase("saving"), saving.beside(path) as partial:
            saving.outside_of_scopes(model_methods.keras_own("export"), self.model, partial, verbose=False)
            about = os.path.join(partial, _ABOUT)
            os.makedirs(os.path.dirname(about), exist_ok=True)
            write_file(about, json.dumps({"by": self._by, "epoch": epoch + 1, "metrics": metrics}).encode())
        self._version = version
        logger.info(f"exported the model of epoch {epoch + 1} ({self.monitor} {metrics[self.monitor]:.6g}) to {path}")
        try:
            self._remove_others(version)
        except OSError as e:
            why = write_error_reason(e)
            if storage.is_url(self.path):
                why = storage.reason(e)
            logger.warning(f"earlier exports in {self.path} are not removed now: {why}; the next export removes them")

    def _remove_others(self, version: int) -> None:
        """Removes this class's exports before `version`. If this process ends meanwhile, no incomplete model keeps a number."""
        earlier = [
            name for name in _names(self.path) if name.isdecimal() and int(name) != version and self._about(name)
        ]
        for name in earlier:
            old_path = os.path.join(self.path, name)
            if storage.is_url(self.path):  # renaming would copy the files
                storage.remove(os.path.join(old_path, saving.MARK))
                storage.remove_tree(old_path)
            else:
                storage.rename(old_path, os.path.join(self.path, f"{name}.{uuid.uuid4().hex[:8]}.partial"))
        for name in filter(_PARTIAL.fullmatch, _names(self.path)):
            storage.remove_tree(os.path.join(self.path, name))

    def _about(self, version: int | str) -> dict[str, Any] | None:
        """Returns the description in an export; None if this class has not written it."""
        try:
            return json.loads(storage.read(os.path.join(self.path, str(version), _ABOUT)))
        except (FileNotFoundError, NotADirectoryError):
            return None


def newest_version(path: str | os.PathLike[str]) -> int:
    """Returns the highest number that names a folder in `path`, or 0.

    Raises:
        WriteError: The folder is at a URL that cannot be read.
    """
    try:
        return max((int(name) for name in _names(os.fspath(path)) if name.isdecimal()), default=0)
    except storage.StorageError as e:
        raise WriteError(
            f"{storage.reason(e)}. Models cannot be exported there: fix the storage, and run again."
        ) from e


def _names(path: str) -> list[str]:
    try:
        return storage.with_retries(lambda: storage.list_folder(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
