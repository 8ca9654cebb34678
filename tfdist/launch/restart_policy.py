"""`RestartPolicy`: it decides when a supervisor restarts a failed run, and when it gives up. No TensorFlow here."""

from __future__ import annotations

import time
from collections.abc import Callable

from tfdist.runtime.report.ending import Kind

_SAME_STEP = 3  # failures at one step, after which the step itself must be the cause
_LONGEST_DELAY = 30.0  # seconds


def why_final(kind: Kind, saved: int = 0) -> str:
    """Returns why a task would fail again after a restart, or an empty text.

    Args:
        kind: The kind of its end.
        saved: The step of the last backup, or 0.
    """
    last = f"; the last backup was that of step {saved}" if saved else ""
    whys = {
        Kind.REFUSED: f"no restart, because it would reject the backups again{last}",
        Kind.INPUT: "it would ask for input again",
        Kind.CONFIG: "an invalid command line or configuration would fail again",
    }
    return whys.get(kind, "")


class RestartPolicy:
    """A budget of restarts, which refills after steady progress.

    Args:
        limit: The budget: number of restarts.
        refill_seconds: A failure after this many seconds without another, and at a later step, refills the budget first.
        clock: Returns the time in seconds. Tests replace it, so that they need not wait.

    Attributes:
        limit: The budget.
        spent: Restarts spent since the last refill.
        total: All restarts so far.
    """

    def __init__(self, limit: int, refill_seconds: float = 600.0, clock: Callable[[], float] = time.monotonic):
        self.limit = limit
        self.spent = 0
        self.total = 0
        self._refill_seconds = refill_seconds
        self._clock = clock
        self._last = clock()  # time of the last failure
        self._step: int | None = None  # of the last failure
        self._same = 0  # consecutive failures at that step
        self._stuck = 0  # restarts without progress

    def failed(self, step: int | None) -> str:
        """Counts a failure, and decides whether the run starts again.

        Args:
            step: The training steps completed before the failure, or None before the first step.

        Returns:
            An empty text if the run should be restarted, else the reason against a restart.
        """
        now = self._clock()
        before = self._step
        progressed = step is not None and (before is None or step > before)
        if progressed and now - self._last >= self._refill_seconds:
            self.spent = 0
        self._last = now
        # A failure before the first step tells nothing about the step of the one before.
        if step is not None:
            if step != before:
                self._same = 0
            self._same += 1
            self._step = step
        self._stuck = 0 if progressed else self._stuck + 1
        if not self.limit:
            return "no restarts are allowed"
        if step is not None and self._same == _SAME_STEP:
            return f"it has failed {_SAME_STEP} times at step {step}"
        if self.spent == self.limit:
            return f"all {self.limit} restarts are spent"
        self.spent += 1
        self.total += 1
        return ""

    @property
    def is_left(self) -> bool:
        """Returns whether a restart is left."""
        return self.spent < self.limit

    def resized(self) -> None:
        """Counts a start with another number of workers, which uses no restart."""
        self.total += 1
        self._stuck = self._same = 0

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start: none after progress, then 1, 2, 4, ..., at most 30."""
        if not self._stuck:
            return 0.0
        return min(2.0 ** (self._stuck - 1), _LONGEST_DELAY)
