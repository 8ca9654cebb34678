"""The callback `Throughput`: the speed of a training and the times of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import keras
import numpy as np

from tfdist.aliases import Logs


class Throughput(keras.callbacks.Callback):
    """Measures training steps.

    Args:
        global_batch_size: Examples per step over all replicas.
        clock: Returns seconds. Injected so that tests need not wait.

    Attributes:
        global_batch_size: Examples per step.
        steps: Steps seen.
        step_seconds: Seconds of each step but those of the first execution, which compiles. A step's time includes the
            callbacks' and the wait for data; steps of one execution share its time evenly.

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

    only_observes = True  # so that ranks need not agree after each step

    def __init__(self, global_batch_size: int, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self.global_batch_size = global_batch_size
        self._clock = clock
        self.steps = 0
        self.step_seconds: list[float] = []
        self._last: float | None = None
        self._epoch_steps = 0
        self._compiled = False

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._last = self._clock() if self._compiled else None
        self._epoch_steps = 0

    def state_dict(self) -> dict[str, int]:
        """Returns the state for a backup; times are this run's own."""
        return {"steps": self.steps, "epoch_steps": self._epoch_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the state from `state_dict`."""
        self.steps, self._epoch_steps = state["steps"], state["epoch_steps"]

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        now = self._clock()
        # Keras gives the number of an execution's last step, also where the epoch ends before it.
        ended = min(batch + 1, (self.params or {}).get("steps") or batch + 1)
        steps = ended - self._epoch_steps
        if self._last is not None and steps:
            self.step_seconds += [(now - self._last) / steps] * steps
        self.steps += steps
        self._epoch_steps = ended
        self._last = now
        self._compiled = True

    @property
    def examples_per_second(self) -> float | None:
        """Examples per second over all replicas, while training; None before the second step."""
        return self.global_batch_size * len(self.step_seconds) / sum(self.step_seconds) if self.step_seconds else None

    @property
    def step_ms(self) -> dict[str, float | None]:
        """The mean, the median and the 95th percentile of the step times, in milliseconds."""
        if not self.step_seconds:
            return {"mean": None, "median": None, "p95": None}
        mean, (median, p95) = np.mean(self.step_seconds), np.percentile(self.step_seconds, [50, 95])
        return {
            name: round(1000 * float(value), 3) for name, value in (("mean", mean), ("median", median), ("p95", p95))
        }
