"""The number of updates of other steps that were applied between a step's read of the weights and its own update, and a limit of this number."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from tfdist.engine import RunningMeans


@dataclasses.dataclass(eq=False)
class _Step:
    """A training step that runs. `overlaps` counts the other steps that have run at the same time so far."""

    overlaps: int


class Staleness:
    """Measures the staleness of each update on the chief, and delays steps that would let it exceed a limit.

    The chief sees that a step begins before the step reads weights, and that it ends after its update. So the updates that a step
    does not know are those of steps that ran at the same time: their number is the limit's. The measure is how many of
    them ended before the step did.
    """

    def __init__(self, limit: int | None):
        self._limit = limit
        self._changed = threading.Condition()
        self._running: list[_Step] = []
        self._ended = 0  # steps; their updates are applied
        self._total = 0
        self._most = 0

    @contextlib.contextmanager
    def step(self, measured: RunningMeans) -> Iterator[None]:
        """Returns the context in which a thread runs one training step. Waits for other steps first if there is a limit.

        The wait ends when other steps end, and the scheduler limits their time.
        """
        with self._changed:
            self._changed.wait_for(self._may_begin)
            for other in self._running:
                other.overlaps += 1
            step = _Step(len(self._running))
            self._running.append(step)
            before = self._ended
        is_applied = False
        try:
            yield
            is_applied = True
        finally:
            with self._changed:
                self._running.remove(step)
                if is_applied:
                    staleness = self._ended - before
                    self._ended += 1
                    self._total += staleness
                    self._most = max(self._most, staleness)
                    measured.add("ps/staleness", staleness)
                self._changed.notify_all()

    def report(self) -> dict[str, Any] | None:
        """Returns the `mean` and the `max` over all updates; None without an update."""
        with self._changed:
            if not self._ended:
                return None
            return {"mean": round(self._total / self._ended, 3), "max": self._most}

    def _may_begin(self) -> bool:
        if self._limit is None:
            return True
        return len(self._running) <= self._limit and all(other.overlaps < self._limit for other in self._running)
