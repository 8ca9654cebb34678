"""The callback `Tracker`: the record of a run in MLflow, Weights & Biases, Trackio or your own tracker."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Logs
from tfdist.config import monitoring, registry
from tfdist.errors import ConfigError, describe_error, format_value
from tfdist.monitoring.side_summaries import flatten
from tfdist.runtime.log import logger

_METHODS = ("start", "log", "finish")


class Tracker(keras.callbacks.Callback):
    """Callback that records the parameters of a run, and the metrics of each epoch by Keras' names, in a tracker.

    Pass it on every worker: the chief alone writes. A backup holds the record's identifier, so that a run that resumes continues its
    record. Environment variables choose the place: `MLFLOW_TRACKING_URI` and `MLFLOW_EXPERIMENT_NAME`, `WANDB_PROJECT`, or
    `TRACKIO_PROJECT`.

    Args:
        tracker: `"mlflow"`, `"wandb"`, `"trackio"`, or your own class as `"package.module:Class"`. It is called without arguments and needs
            three methods: `start(parameters, run_id)` begins a record, or continues that of `run_id` if it is not empty, and returns its
            identifier; `log(metrics, step)` records an epoch, from 0, which a further `fit` counts on; `finish()` ends the record.
        parameters: The parameters by name; those of nested mappings get names such as `optimizer.momentum`.

    Attributes:
        run_id: On the chief, the record's identifier; empty before the first epoch.

    Raises:
        ConfigError: The tracker is unknown or not installed.

    Examples:
        >>> from tfdist.monitoring import Tracker
        >>> Tracker("mlflw")
        Traceback (most recent call last):
        tfdist.errors.ConfigError: unknown tracker 'mlflw'; did you mean 'mlflow'? Known: mlflow, package.module:Class, trackio, wandb.
    """

    only_observes = True

    def __init__(self, tracker: str, parameters: Mapping[str, Any] | None = None):
        super().__init__()
        monitoring.check_tracker("tracker", tracker)
        # Not in `check_tracker`: a job for a cluster may be written where the package is not installed.
        if tracker in monitoring.TRACKERS and not importlib.util.find_spec(tracker):
            raise ConfigError(f"tracker {tracker!r} needs the package {tracker}, which is not installed; install it.")
        self.run_id = ""
        self._next_step = 0
        self._offset = 0  # of a step from its epoch
        self._name = tracker
        self._make = registry.resolve("tracker", tracker, monitoring.TRACKERS)
        if not isinstance(self._make, type) or not all(hasattr(self._make, name) for name in _METHODS):
            raise ConfigError(
                f"tracker {tracker!r} must be a class with the methods {', '.join(_METHODS)}. Received: {self._make!r}."
            )
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ConfigError(f"parameters must be a mapping of names to values. Received: {format_value(parameters)}.")
        self._parameters = dict(flatten(parameters or {}))
        self._tracker: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a backup: the record's identifier and steps."""
        return {"run_id": self.run_id, "next_step": self._next_step, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from `state_dict`."""
        self.run_id = state["run_id"]
        self._next_step = state.get("next_step", 0)  # older backups have the identifier alone
        self._offset = state.get("offset", 0)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        # Not at the beginning of the training, where the state is not restored yet. A further `fit` may count its epochs from 0 again.
        self._offset = max(self._offset, self._next_step - epoch)
        strategy = getattr(self.model, "distribute_strategy", None) or tf.distribute.get_strategy()
        if self._tracker is None and strategy.extended.should_save_summary:
            self._tracker = self._make()
            self.run_id = str(self._tracker.start(self._parameters, self.run_id))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self._tracker is None:
            return
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        step = epoch + self._offset
        self._next_step = step + 1
        try:
            self._tracker.log(metrics, step)
        except Exception as e:  # of the tracker's server
            logger.warning(
                f"the metrics of epoch {epoch + 1} are missing in {self._name}: {describe_error(e)}; the training continues."
            )

    def on_train_end(self, logs: Logs = None) -> None:
        if self._tracker is not None:
            self._tracker.finish()
            self._tracker = None


class MLflow:
    """A run of MLflow."""

    def __init__(self) -> None:
        self._mlflow = importlib.import_module("mlflow")

    def start(self, parameters: Mapping[str, Any], run_id: str) -> str:
        run = self._mlflow.start_run(run_id=run_id or None)
        if not run_id:
            self._mlflow.log_params(parameters)
        return str(run.info.run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(metrics, step=step)

    def finish(self) -> None:
        self._mlflow.end_run()


class WandB:
    """A run of Weights & Biases."""

    _run: Any

    def start(self, parameters: Mapping[str, Any], run_id: str) -> str:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(id=run_id or None, resume="allow", config=parameters)
        return str(self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def finish(self) -> None:
        self._run.finish()


class Trackio(WandB):
    """A run of Trackio, which has the interface of Weights & Biases, and knows runs by their names."""

    def start(self, parameters: Mapping[str, Any], run_id: str) -> str:
        trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", "tfdist")
        self._run = trackio.init(project, run_id or None, resume="allow", config=parameters)
        return str(self._run.name)
