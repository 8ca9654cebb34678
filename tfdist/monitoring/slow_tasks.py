"""The comparison of the tasks' own step times, and the warning about a slow task."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

import keras

from tfdist.aliases import Logs
from tfdist.compat import tf_internals
from tfdist.engine import Engine
from tfdist.runtime.log import logger
from tfdist.strategy import as_ours

_EVERY = 50  # steps
_RATIO = 1.5  # to the median of the other tasks, above which a task is slow
_NOISE_MS = 5.0  # the difference to the median of the other tasks up to which a task is not slow
_LEAST_MS = 0.1  # smaller medians count as this, because ratios to them are meaningless
_IN_A_ROW = 3  # comparisons after which a task counts as slow, and after which it counts as recovered
_REPEAT_AFTER = 10  # comparisons between two warnings about a task that stays as slow


@dataclasses.dataclass
class _Task:
    """A task's last comparisons, and the last warning about it.

    Attributes:
        ratios: The last ratios of its time to the others' median; 0 where it was not slow.
        warned: The ratio of the last warning; 0 without a warning since the task has recovered.
        since: The number of comparisons since that warning.
    """

    ratios: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_IN_A_ROW))
    warned: float = 0.0
    since: int = 0


class SlowTaskRule:
    """Decides when a task is slow: over 1.5 times, and 5 ms above, the median of the other tasks in three comparisons in a row.

    It warns again if the ratio has grown by half since the last warning, or after ten comparisons. A task that was not slow in three
    comparisons in a row has recovered.

    Examples:
        >>> from tfdist.monitoring.slow_tasks import SlowTaskRule
        >>> rule = SlowTaskRule()
        >>> [rule.note({"worker:0": 20.0, "worker:1": 61.0}) for _ in range(3)]
        [{}, {}, {'worker:1': 20.0}]
    """

    def __init__(self) -> None:
        self._tasks: collections.defaultdict[str, _Task] = collections.defaultdict(_Task)

    def note(self, times: Mapping[str, float]) -> dict[str, float]:
        """Notes a comparison of step times in milliseconds. Returns the tasks to warn about, with the median of the other tasks."""
        due: dict[str, float] = {}
        if len(times) < 2:
            return due
        for name, ms in times.items():
            median = statistics.median(other for task, other in times.items() if task != name)
            ratio = 0.0
            if ms > _RATIO * median and ms - median > _NOISE_MS:
                ratio = ms / max(median, _LEAST_MS)
            if self._is_due(self._tasks[name], ratio):
                due[name] = median
        return due

    @staticmethod
    def _is_due(task: _Task, ratio: float) -> bool:
        """Notes a ratio of a task; returns whether to warn now."""
        task.ratios.append(ratio)
        task.since += 1
        if not any(task.ratios):
            task.warned = 0.0
        # One slow comparison does not cause a warning.
        lasting = min(task.ratios) if len(task.ratios) == _IN_A_ROW else 0.0
        if not lasting:
            return False
        is_known = task.warned > 0 and lasting < _RATIO * task.warned
        if is_known and task.since < _REPEAT_AFTER:
            return False
        task.warned = lasting
        task.since = 0
        return True


def has_own_times(strategy: object) -> bool:
    """Returns whether the tasks' own step times are measured: several tasks train, and TensorFlow has a clock."""
    ours = as_ours(strategy)
    if ours is None or tf_internals.is_op_determinism_enabled():
        return False
    return ours.num_workers > 1 or bool(ours.cluster and len(ours.cluster.jobs["worker"]) > 1)


class SlowTasks(keras.callbacks.Callback):
    """Callback that compares the tasks' own step times every 50 steps, and warns on the chief about a slow task.

    `Trainer.fit` adds it on every task.

    Args:
        engine: The engine, which measures.
        is_chief: Whether this task warns.
    """

    only_observes = True  # changes no training state, so ranks need not agree after each step

    def __init__(self, engine: Engine, is_chief: bool):
        super().__init__()
        self._engine = engine
        self._is_chief = is_chief
        self._rule = SlowTaskRule()
        self._steps = 0  # since the last comparison
        self._epoch_steps = 0
        self._is_first = True

    def on_train_begin(self, logs: Logs = None) -> None:
        self._is_first = True

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch_steps = 0
        own_time = self._engine.strategy.own_time
        if own_time:
            own_time.skip()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        # Keras passes the last step of a full execution, even if the epoch ends earlier, within the execution.
        epoch_steps = min(batch + 1, (self.params or {}).get("steps") or batch + 1)
        self._steps += epoch_steps - self._epoch_steps
        self._epoch_steps = epoch_steps
        if self._is_first:  # it compiles
            self._is_first = False
            self._steps = 0
            self._engine.own_step_ms(self.model, 0)
        if self._steps < _EVERY:
            return
        times = self._engine.own_step_ms(self.model, self._steps)
        self._steps = 0
        if not self._is_chief:
            return
        for name, median in self._rule.note(times).items():
            ratio = times[name] / max(median, _LEAST_MS)
            logger.warning(
                f"{name} takes {ratio:.1f} times as long as the median ({times[name]:.0f} ms, {median:.0f} ms)"
            )
