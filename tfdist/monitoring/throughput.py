"""The callback `Throughput`: examples per second, step times, and the numbers of workers over time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfdist.aliases import Logs


class Throughput(keras.callbacks.Callback):
    """Callback that measures examples per second and the times of training steps.

    Args:
        global_batch_size: Examples per step over all replicas.
        clock: Returns the time in seconds; tests pass their own, so that they need not wait.

    Attributes:
        global_batch_size: Examples per step.
        steps: Training steps so far, those before a resume included.
        step_seconds: Seconds of each step, except those of the first execution, which compiles. They include callbacks and
            the wait for data. The steps of one execution (`steps_per_execution`) get equal parts of its time.
        sizes: The numbers of workers over time, those before a resume included: `{"step": 40, "workers": 2}` for two workers after
            40 steps. A run that has never changed its number has one entry.

    Examples:
        >>> import keras, numpy as np, tfdist
        >>> from tfdist.monitoring import Throughput
        >>> trainer, throughput = tfdist.Trainer("mirrored"), Throughput(global_batch_size=4)
        >>> with trainer.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = trainer.fit(model, np.ones((64, 4)), np.ones((64, 1)), batch_size=4, callbacks=[throughput], verbose=0)
        >>> throughput.examples_per_second > 0
        True
    """

    only_observes = True  # changes no training state, so ranks need not agree on it after each step

    def __init__(self, global_batch_size: int, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self.global_batch_size = global_batch_size
        self._clock = clock
        self.steps = 0
        self.step_seconds: list[float] = []
        self._last: float | None = None
        self._epoch_steps = 0
        self._compiled = False
        self.sizes: list[dict[str, int]] = []
        self._workers = 1

    def set_model(self, model: keras.Model) -> None:
        """Sets the model, whose strategy has the workers."""
        super().set_model(model)
        self._workers = count_workers(getattr(model, "distribute_strategy", None))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._last = self._clock() if self._compiled else None
        self._epoch_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a backup: step counts and sizes, without the times, which belong to one process."""
        return {"steps": self.steps, "epoch_steps": self._epoch_steps, "sizes": self.sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from `state_dict`."""
        self.steps = state["steps"]
        self._epoch_steps = state["epoch_steps"]
        self.sizes = list(state.get("sizes", []))

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        now = self._clock()
        # Keras passes the last step of a full execution, even if the epoch ends earlier, within the execution.
        epoch_steps = min(batch + 1, (self.params or {}).get("steps") or batch + 1)
        steps = epoch_steps - self._epoch_steps
        if self._last is not None and steps:
            self.step_seconds += [(now - self._last) / steps] * steps
        if not self.sizes or self.sizes[-1]["workers"] != self._workers:
            self.sizes.append({"step": self.steps, "workers": self._workers})
        self.steps += steps
        self._epoch_steps = epoch_steps
        self._last = now
        self._compiled = True

    @property
    def examples_per_second(self) -> float | None:
        """Examples per second over all replicas, or None before the second execution has ended."""
        if not self.step_seconds:
            return None
        return self.global_batch_size * len(self.step_seconds) / sum(self.step_seconds)

    @property
    def step_ms(self) -> dict[str, float | None]:
        """The mean, median and 95th percentile of the step times in milliseconds; None before the second execution has ended."""
        if not self.step_seconds:
            return {"mean": None, "median": None, "p95": None}
        milliseconds = 1000 * np.array(self.step_seconds)
        median, p95 = np.percentile(milliseconds, [50, 95])
        values = {"mean": np.mean(milliseconds), "median": median, "p95": p95}
        return {name: round(float(value), 3) for name, value in values.items()}


def count_workers(strategy: Any) -> int:
    """Returns the number of workers of a strategy; 1 if it trains in one process."""
    resolver = getattr(strategy, "cluster_resolver", None)
    jobs = resolver.cluster_spec().as_dict() if resolver else {}
    workers = len(jobs.get("worker", ()))
    if "ps" not in jobs:  # the chief of parameter servers runs no steps
        workers += len(jobs.get("chief", ()))
    return workers or 1
