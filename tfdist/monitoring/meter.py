"""The meters of `TensorBoard`. A meter measures a few tags of a training between two writes."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import psutil
import tensorflow as tf

from tfdist.compat import keras_internals, optimizer_search, tf_internals
from tfdist.compression.base import Compressor
from tfdist.gradients.finite_updates import skipped_updates
from tfdist.gradients.optimizer import get_compressor, get_reduction
from tfdist.gradients.reduction import Reduction
from tfdist.monitoring import compression_report
from tfdist.monitoring.network import WireBytes
from tfdist.monitoring.throughput import count_workers
from tfdist.runtime.report import goodput, progress
from tfdist.strategy import as_ours


class Meter(abc.ABC):
    """Interface of a measurement for `TensorBoard`, which calls the methods on every task. The methods must not be collectives."""

    model: keras.Model
    is_chief: bool

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        """Starts the measurement of a model, before its first step is traced."""
        self.model = model
        self.is_chief = is_chief

    def on_epoch_begin(self) -> None:  # noqa: B027 (not all meters need it)
        """Called at the begin of each epoch."""

    def on_step(self, step: int) -> None:  # noqa: B027
        """Called after each execution, with the number of the training's last step. It must not read tensors."""

    @abc.abstractmethod
    def read(self) -> dict[str, float | None]:
        """Returns a value for each tag, measured since the last call; None if it cannot be measured."""


class SystemMeter(Meter):
    """Meter of this process's resident memory, and of its processor time since the last write: 100 is one fully used core."""

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        self._process = psutil.Process()
        self._last = self._times()

    def read(self) -> dict[str, float | None]:
        cpu, wall = self._times()
        last_cpu, last_wall = self._last
        self._last = cpu, wall
        percent = 100 * (cpu - last_cpu) / (wall - last_wall)
        return {"system/rss_bytes": self._process.memory_info().rss, "system/cpu_percent": percent}

    @staticmethod
    def _times() -> tuple[float, float]:
        """Returns processor and wall time in seconds. psutil's ticks of 10 ms are too coarse for writes every few ms."""
        return time.process_time(), time.perf_counter()


class FaultMeter(Meter):
    """Meter of the run's restarts and repeated steps.

    The supervisor counts both; without a supervisor there are no values. Only the chief knows the repeated steps.
    """

    _is_settled = False
    _lost: int | None = None

    def on_step(self, step: int) -> None:
        # Only after a step: of two trainings in one program, the first may already be complete and run no steps.
        if self.is_chief and not self._is_settled:
            self._is_settled = True
            self._lost = progress.settle_lost_steps()

    def read(self) -> dict[str, float | None]:
        restarts = progress.restarts() if progress.is_supervised() else None
        return {"faults/restarts": restarts, "faults/lost_steps": self._lost}


class SizeMeter(Meter):
    """Meter of the number of workers, which may differ between the processes of a run; on the chief."""

    def read(self) -> dict[str, float | None]:
        if not self.is_chief:
            return {}
        return {"cluster/workers": count_workers(self.model.distribute_strategy)}


class GoodputMeter(Meter):
    """Meter of the wall time by part, which the callback `Goodput` counts on the chief; without that callback there are no values."""

    def read(self) -> dict[str, float | None]:
        ledger = goodput.current()
        if ledger is None or not self.is_chief:
            return {}
        seconds = ledger.now()
        parts: dict[str, float | None] = {f"goodput_seconds/{part}": value for part, value in seconds.items()}
        return {"goodput/productive": seconds["steps"] / (sum(seconds.values()) or 1.0), **parts}


class WireMeter(Meter):
    """Meter of the bytes that a rank sends per step, if ranks are in several processes; see `WireBytes`."""

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        ours = as_ours(model.distribute_strategy)
        self._wire = WireBytes(*ours.cluster_task) if ours and ours.cluster_task else None
        self._planned: dict[Compressor | None, int | None] = {}  # by the compressor of the step

    def on_epoch_begin(self) -> None:
        if self._wire:
            self._wire.on_epoch_begin(0)

    def on_step(self, step: int) -> None:
        if self._wire:
            self._wire.on_train_batch_end(step)

    def read(self) -> dict[str, float | None]:
        if self._wire is None:
            return {}
        return {"comm/bytes_per_step": self._wire.take(), "comm/gradient_bytes_per_step": self._gradient_bytes()}

    def _gradient_bytes(self) -> int | None:
        """Returns the planned bytes of the gradients, which may travel through shared memory."""
        optimizer: Any = getattr(self.model, "optimizer", None)
        compressor = get_compressor(optimizer) if optimizer else None
        if compressor and int(optimizer.iterations.numpy()) <= compressor.start_step:
            compressor = None
        if compressor not in self._planned:
            replicas = tf_internals.num_replicas(self.model.distribute_strategy)
            self._planned[compressor] = compression_report.planned_bytes(self.model, compressor, replicas)
        return self._planned[compressor]


class CompressionMeter(Meter):
    """Meter of the gradients' compression ratio, and of the residual's norm.

    The norm is over the residuals of all replicas of this process. Without a compressor there are no values.
    """

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        self._optimizers: list[keras.optimizers.Optimizer] | None = None
        self._ratios: dict[Compressor, float | None] = {}

    def read(self) -> dict[str, float | None]:
        if self._optimizers is None:  # search once, because it takes a millisecond or more
            self._optimizers = optimizer_search.optimizers(self.model)
        reductions = {optimizer: get_reduction(optimizer) for optimizer in self._optimizers}
        reducing = {optimizer: reduction for optimizer, reduction in reductions.items() if reduction}
        if not reducing:
            return {}
        optimizer, reduction = next(iter(reducing.items()))  # the Trainer gives all optimizers the same compressor
        has_begun = int(optimizer.iterations.numpy()) > reduction.compressor.start_step
        ratio = self._planned_ratio(reduction) if has_begun else 1.0
        return {"comm/compression_ratio": ratio, "comm/residual_norm": self._residual_norm(reducing.values())}

    def _planned_ratio(self, reduction: Reduction) -> float | None:
        compressor = reduction.compressor
        if compressor not in self._ratios:
            replicas = tf_internals.num_replicas(self.model.distribute_strategy)
            plain = compression_report.planned_bytes(self.model, None, replicas)
            compressed = compression_report.planned_bytes(self.model, compressor, replicas)
            self._ratios[compressor] = plain / compressed if plain and compressed else None
        return self._ratios[compressor]

    def _residual_norm(self, reductions: Iterable[Reduction]) -> float | None:
        local = self.model.distribute_strategy.experimental_local_results
        residuals = [
            component.read_value()
            for reduction in reductions
            for state in reduction.residuals
            for component in local(state)  # reading the distributed variable would be a collective
        ]
        return float(tf.linalg.global_norm(residuals)) if residuals else None


class ExecutionMeter(Meter):
    """Meter of the time that steps waited for their batch and, with parameter servers, of the overlap of workers' steps.

    The model's training function measures both; with a custom training function there are no values.
    """

    def read(self) -> dict[str, float | None]:
        measured = getattr(self.model.train_function, "measured", None)
        return dict(measured.take()) if measured else {}


class SkipMeter(Meter):
    """Meter of the updates that `nan_policy` has skipped because a gradient was not finite. All replicas skip the same updates."""

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        # Set at the first write, because the search for optimizers is slow.
        self._numbers: list[tf.Variable] | None = None

    def read(self) -> dict[str, float | None]:
        if not self.is_chief:
            return {}
        if self._numbers is None:
            self._numbers = skipped_updates(self.model)
        skipped = sum(float(number.numpy()) for number in self._numbers) if self._numbers else None
        return {"train/skipped_updates": skipped}


class GradientNorm(Meter):
    """Meter of the L2 norm of the last update's gradient: reduced over all replicas, accumulated, unscaled, and before clipping.

    Each replica computes the norm in its step, on the same gradient. There are no values with parameter servers, where no replica has the
    reduced gradient. Nor are there values with several replicas under a strategy of TensorFlow, where Keras clips before it reduces.
    """

    _norm: tf.Variable | None = None

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        optimizer = getattr(model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # that of a LossScaleOptimizer
        strategy = model.distribute_strategy
        ours = as_ours(strategy)
        no_replica_has_it = ours.traits.asynchronous if ours else strategy.num_replicas_in_sync > 1
        if optimizer is None or no_replica_has_it:
            return
        clip = keras_internals.clip_method(optimizer)
        if not isinstance(clip, _NormThenClip):
            clip = _NormThenClip(clip)
            keras_internals.replace_clip(optimizer, clip)
            if ours:
                ours.gauges = [*ours.gauges, clip.norm]
            model.train_function = None  # so that Keras traces it again; on all workers
        self._norm = clip.norm

    def read(self) -> dict[str, float | None]:
        if not self.is_chief or self._norm is None:
            return {}
        return {"train/gradient_norm": float(self._norm)}


class _NormThenClip:
    """Replacement of an optimizer's clipping method that also assigns the gradients' norm to a variable."""

    def __init__(self, clip: Callable[[Any], Any]):
        self._clip = clip
        self.norm = tf.Variable(float("nan"), trainable=False, name="gradient_norm")

    def __call__(self, grads: Sequence[Any]) -> Any:
        self.norm.assign(tf.linalg.global_norm([tf.cast(grad, tf.float32) for grad in grads]))
        return self._clip(grads)
