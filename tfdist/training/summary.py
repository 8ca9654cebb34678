"""The summary of a run, `summary.json`: configuration, cluster, metrics and speed."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist.config import TrainConfig
from tfdist.monitoring import compression_report, side_summaries
from tfdist.monitoring.goodput import Goodput
from tfdist.monitoring.network import WireBytes
from tfdist.monitoring.throughput import Throughput
from tfdist.runtime.report import progress
from tfdist.training.trainer import Trainer


class RunSummary:
    """The measurements of a run.

    Args:
        config: The configuration.
        trainer: The trainer of the run.
        batch_size: Examples per step.
        logs: The folder in which the chief counts the wall time.
        started: The `time.perf_counter()` of the start.

    Attributes:
        goodput: The callback that counts the wall time by part.
        callbacks: The callbacks that measure, for `fit`.
    """

    def __init__(self, config: TrainConfig, trainer: Trainer, batch_size: int, logs: pathlib.Path, started: float):
        self._config = config
        self._trainer = trainer
        self._started = started
        self._throughput = Throughput(batch_size)
        self.goodput = Goodput(logs / "goodput.bin" if trainer.is_chief else None)
        self.callbacks: list[keras.callbacks.Callback] = [self._throughput, self.goodput]
        self._sent: WireBytes | None = None
        if trainer.cluster and not config.strategy.traits.asynchronous:
            begins = trainer.compression.start_step if trainer.compression else 0
            self._sent = WireBytes(trainer.cluster, trainer.task, begins=begins)
            self.callbacks.append(self._sent)

    def report(
        self,
        model: keras.Model,
        history: keras.callbacks.History,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> dict[str, Any]:
        """Returns the content of `summary.json`, after `fit` with `callbacks` has returned `history`."""
        config, trainer, throughput = self._config, self._trainer, self._throughput
        cluster = trainer.cluster
        speed = throughput.examples_per_second
        sent = self._bytes_per_step(model)
        counters = trainer.server_report(model)
        for feature in trainer.strategy.features:
            counters |= feature.summary(model, trainer.strategy.num_workers)
        epochs = len(history.epoch)
        if epochs < config.epochs and model.stop_training:
            stopped = [type(callback).__name__ for callback in callbacks if getattr(callback, "stopped_epoch", 0)]
            counters["ended_early"] = f"{epochs} of {config.epochs} epochs ({', '.join(stopped) or 'stop_training'})"
        return {
            "task": config.task,
            "strategy": config.strategy.name,
            "num_replicas": trainer.num_replicas,
            "cluster": {job: len(addresses) for job, addresses in cluster.jobs.items()} if cluster else {"worker": 1},
            "sizes": throughput.sizes,
            "transport": trainer.strategy.transport or None,
            "transport_reason": trainer.strategy.transport_reason or None,
            "batch_size": throughput.global_batch_size,
            "seed": config.seed,
            "epochs": epochs,
            "steps": throughput.steps,
            "metrics": {name: finite_or_none(values[-1]) for name, values in history.history.items()},
            "examples_per_second": speed and round(speed, 1),
            "step_ms": throughput.step_ms,
            "compression": config.compression.to_dict(complete=True),
            "wire_bytes_per_step": sent,
            "restarts": progress.restarts(),
            **counters,
            "wall_seconds": round(time.perf_counter() - self._started, 2),
            "goodput": self.goodput.report(),
            "versions": side_summaries.versions(),
            "training": trainer.backup.training_id if trainer.backup else "",
        }

    def _bytes_per_step(self, model: keras.Model) -> dict[str, Any]:
        """Returns the bytes that a rank sends in a step, `predicted` and `measured`; None if ranks exchange no gradients.

        If compression starts later in the training, `before_compression` has the bytes of the steps before.
        """
        sent, compressor, replicas = self._sent, self._trainer.compression, self._trainer.num_replicas
        if sent is None:
            return {"predicted": None, "measured": None}
        entries: dict[str, Any] = {
            "predicted": compression_report.planned_bytes(model, compressor, replicas),
            "measured": sent.per_step,
        }
        if compressor and compressor.start_step:
            entries["before_compression"] = {
                "predicted": compression_report.planned_bytes(model, None, replicas),
                "measured": sent.per_step_before,
            }
        return entries


def finite_or_none(value: Any) -> Any:
    """Returns a metric as plain numbers, with None for values that are not finite: JSON has no NaN."""
    values = np.asarray(value, np.float64)
    return np.where(np.isfinite(values), values.astype(object), None).tolist()  # type: ignore[call-overload]
