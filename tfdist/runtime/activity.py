"""The activity of this task's main thread: its wait in a step or an exchange, and the longest wait so far. No TensorFlow here.

The main thread writes a few attributes per execution of steps; a watching thread reads them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_FACTOR, _LEAST = 5.0, 60.0  # of the deduced limit: a factor of the longest wait, and the least seconds
FIRST = 10.0  # a first execution has this multiple of the limit


class Activity:
    """The waits of a process.

    Args:
        clock: Returns the time in seconds. Tests replace it.

    Attributes:
        since: The time at which the current wait of the main thread began; 0 without a wait.
        where: The kind of the last wait: `"step"`, `"exchange"` or `"data"`.
        steps: The number of executions so far.
        traces: The number of traces of a step so far.
        longest: The longest wait in seconds, without first executions.
        fetching: Returns whether the current step waits for its own data.
        watched: Whether a thread bounds the waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.since = 0.0
        self.where = ""
        self.steps = self.traces = 0
        self.longest = 0.0
        self.fetching: Callable[[], bool] = lambda: False
        self.watched = False
        self._first, self._traced = False, 0

    @property
    def is_first(self) -> bool:
        """Returns whether the current wait is a function's first execution, or traces it again: it may compile."""
        return bool(self.since) and (self._first or self.traces != self._traced)

    def waited(self) -> float:
        """Returns the seconds of the main thread's current wait; 0 without a wait."""
        since = self.since
        return self._clock() - since if since else 0.0

    def limit(self, fixed: float | None) -> float:
        """Returns the limit of the current wait in seconds; infinity if it is off.

        Args:
            fixed: The configured limit; 0 is off, None deduces the limit.
        """
        if fixed == 0:
            return float("inf")
        base = max(_LEAST, _FACTOR * self.longest) if fixed is None else fixed
        return base * (FIRST if self.is_first else 1)

    def reason(self, fixed: float | None) -> str:
        """Returns how the limit was set, for a message."""
        base = (
            f"5 times the longest step, {self.longest:.1f} s; "
            if fixed is None and _FACTOR * self.longest > _LEAST
            else ""
        )
        return f"{base}strategy.timeout_seconds"

    def begin(self, where: str, first: bool = False) -> None:
        """Notes that the main thread begins to wait."""
        self._first, self._traced, self.where = first, self.traces, where
        self.steps += where == "step"
        self.since = self._clock()

    def end(self, counts: bool = True, counts_first: bool = False) -> None:
        """Notes the end of the wait, and its length if `counts`; that of a first execution if `counts_first`."""
        if counts and self.since and (counts_first or not self.is_first):
            self.longest = max(self.longest, self._clock() - self.since)
        self.since = 0.0

    def note(self, seconds: float) -> None:
        """Notes a wait within a first execution that may happen again, such as for the data."""
        self.longest = max(self.longest, seconds)

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Notes the exchange of `Ranks` in the context. An exchange during a step belongs to the step."""
        if self.since or threading.current_thread() is not threading.main_thread():
            yield
            return
        self.begin("exchange")
        try:
            yield
        finally:
            self.end(counts=self.steps > 1)


main = Activity()
