"""The summary of a run, `summary.json`: configuration, cluster, metrics and speed."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import keras
import numpy as np

from tfdist.cluster import ClusterSpec
from tfdist.compression.base import Compressor
from tfdist.config import TrainConfig
from tfdist.monitoring import compression_report, side_summaries
from tfdist.monitoring.goodput import Goodput
from tfdist.monitoring.network import WireBytes
from tfdist.monitoring.throughput import Throughput
from tfdist.runtime.report import progress


@dataclasses.dataclass
class RunSummary:
    """The results of a run, each set where it becomes known.

    Attributes:
        config: The configuration of the run.
        throughput: The callback that counts the steps.
        goodput: The callback that counts the wall time by part.
        cluster: The cluster, or None without one.
        replicas: The number of replicas.
        transport: The transport between workers; None without several workers.
        transport_reason: Why it was chosen.
        started: The `time.perf_counter()` of the start.
        history: The result of `fit`.
        wire_bytes: The bytes per step, from `wire_bytes_per_step`.
        counters: Counters of parameter servers and of skipped updates.
    """

    config: TrainConfig
    throughput: Throughput
    goodput: Goodput
    cluster: ClusterSpec | None
    replicas: int
    transport: str | None
    transport_reason: str | None
    started: float
    history: keras.callbacks.History = dataclasses.field(default_factory=keras.callbacks.History)
    wire_bytes: dict[str, Any] = dataclasses.field(default_factory=dict)
    counters: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of `summary.json`."""
        config, cluster, throughput = self.config, self.cluster, self.throughput
        speed = throughput.examples_per_second
        return {
            "task": config.task,
            "strategy": config.strategy.name,
            "num_replicas": self.replicas,
            "cluster": {job: len(addresses) for job, addresses in cluster.jobs.items()} if cluster else {"worker": 1},
            "sizes": throughput.sizes,
            "transport": self.transport,
            "transport_reason": self.transport_reason,
            "batch_size": throughput.global_batch_size,
            "seed": config.seed,
            "epochs": len(self.history.epoch),
            "steps": throughput.steps,
            "metrics": {name: finite_or_none(values[-1]) for name, values in self.history.history.items()},
            "examples_per_second": speed and round(speed, 1),
            "step_ms": throughput.step_ms,
            "compression": config.compression.to_dict(complete=True),
            "wire_bytes_per_step": self.wire_bytes,
            "restarts": progress.restarts(),
            **self.counters,
            "wall_seconds": round(time.perf_counter() - self.started, 2),
            "goodput": self.goodput.report(),
            "versions": side_summaries.versions(),
        }


def wire_bytes_per_step(
    model: keras.Model, compressor: Compressor | None, replicas: int, wire: WireBytes | None
) -> dict[str, Any]:
    """Returns the bytes that a rank sends in a step, `predicted` and `measured`; None if unknown.

    If compression starts later in the training, `before_compression` has the bytes of the steps before.

    Args:
        model: The model.
        compressor: The compressor of its gradients, or None.
        replicas: The number of ranks.
        wire: The callback that counted the bytes, or None if ranks do not exchange gradients.
    """
    if wire is None:
        return {"predicted": None, "measured": None}
    entries: dict[str, Any] = {
        "predicted": compression_report.planned_bytes(model, compressor, replicas),
        "measured": wire.per_step,
    }
    if compressor and compressor.start_step:
        entries["before_compression"] = {
            "predicted": compression_report.planned_bytes(model, None, replicas),
            "measured": wire.per_step_before,
        }
    return entries


def finite_or_none(value: Any) -> Any:
    """Returns a metric as plain numbers, with None for values that are not finite: JSON has no NaN."""
    values = np.asarray(value, np.float64)
    return np.where(np.isfinite(values), values.astype(object), None).tolist()  # type: ignore[call-overload]
