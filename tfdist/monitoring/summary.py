"""The summary of a run, `summary.json`: configuration, cluster, metrics and speed."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import keras
import numpy as np

from tfdist.cluster import ClusterSpec
from tfdist.compression.base import Compressor
from tfdist.config import TrainConfig
from tfdist.monitoring import compression_report, side_summaries
from tfdist.monitoring.network import WireBytes
from tfdist.monitoring.throughput import Throughput
from tfdist.runtime import progress, storage
from tfdist.runtime.files import WriteError, write_error_reason


def summarize(
    config: TrainConfig,
    cluster: ClusterSpec | None,
    replicas: int,
    history: keras.callbacks.History,
    throughput: Throughput,
    wire_bytes: dict[str, Any],
    server_report: dict[str, Any],
    started: float,
    goodput: dict[str, Any],
    transport: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Returns the summary of a training.

    Args:
        config: The configuration of the run.
        cluster: The cluster, or None without one.
        replicas: The number of replicas.
        history: The result of `fit`.
        throughput: The callback that counted the steps.
        wire_bytes: The bytes per step, from `wire_bytes_per_step`.
        server_report: Counters of parameter servers.
        started: The `time.perf_counter()` of the start.
        goodput: The wall time of the run by part, from `Goodput.report`.
        transport: The transport between workers and its reason; None without several workers.
    """
    return {
        "task": config.task,
        "strategy": config.strategy.name,
        "num_replicas": replicas,
        "cluster": {job: len(addresses) for job, addresses in cluster.jobs.items()} if cluster else {"worker": 1},
        "sizes": throughput.sizes,
        "transport": transport and transport[0],
        "transport_reason": transport and transport[1],
        "batch_size": throughput.global_batch_size,
        "seed": config.seed,
        "epochs": len(history.epoch),
        "steps": throughput.steps,
        "metrics": {name: finite_or_none(values[-1]) for name, values in history.history.items()},
        "examples_per_second": throughput.examples_per_second and round(throughput.examples_per_second, 1),
        "step_ms": throughput.step_ms,
        "compression": config.compression.to_dict(complete=True),
        "wire_bytes_per_step": wire_bytes,
        "restarts": progress.restarts(),
        **server_report,
        "wall_seconds": round(time.perf_counter() - started, 2),
        "goodput": goodput,
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


def write_json(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    """Writes a JSON file under another name and then renames it, so that readers never see an incomplete file.

    Args:
        path: The file, or its URL; its folder is created.
        value: The value to write. Types that JSON does not have are written as strings.

    Raises:
        WriteError: The file cannot be written.
    """
    text = json.dumps(value, indent=2, default=str) + "\n"  # a task's options may be anything
    path = os.fspath(path)
    try:
        storage.make_folder(os.path.dirname(path))
        storage.with_retries(lambda: storage.write(path, text.encode()))
    except OSError as e:
        if storage.is_url(path):
            raise WriteError(
                f"{storage.reason(e)}. Fix the storage, and run the same command again, which continues from its backup."
            ) from e
        raise WriteError(
            f"cannot write {path}: {write_error_reason(e)}. The old file is unchanged. Free the disk, and run the same command again, "
            "which continues from its backup."
        ) from e
