"""The phase of this process: the present activity of its main thread. No TensorFlow here.

Phases nest: a step within a validation within a `fit`. One thread at a time enters phases; those of other threads have no effect. The hang
watch, goodput, the launcher's table and error messages read them. Steps and exchanges are waits, in which this process may
wait for other tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tfdist.errors import ConfigError, format_value

WAITS = ("step", "exchange", "data")
_FACTOR = 5.0  # a wait is long from this multiple of the longest wait so far,
_LEAST = 60.0  # and from so many seconds


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase.

    Attributes:
        name: `"step"`, `"exchange"` (of numbers with the other tasks), `"data"` (the chief's wait for its own data under parameter servers),
            `"building"` (a model), `"training"`, `"validation"`, `"prediction"`, `"saving"`, `"slow"` (a section of the user's program),
            `"call"` (a method of the Trainer), or an empty text outside of all phases.
        activity: The name of the innermost phase that is no wait, section or call; `"compiling"` within a first execution.
        label: The words for messages, such as `a step (train_step)`.
        since: The time at which it began, by `time.monotonic()`.
        is_first: Whether it may compile: the first execution of a function, or the building of a model.
        seconds: The limit of a section; 0 means no limit, None that it is no section.
        outer: The phase around it.
    """

    name: str
    activity: str
    label: str
    since: float
    is_first: bool = False
    seconds: float | None = None
    outer: Phase | None = None

    @property
    def is_wait(self) -> bool:
        """Returns whether this process may wait for other tasks."""
        return self.name in WAITS

    @property
    def labels(self) -> list[str]:
        """Returns the labels of this phase and those around it, from the outside in."""
        outer = self.outer.labels if self.outer else []
        return [*outer, self.label] if self.label else outer

    @property
    def section(self) -> Phase | None:
        """Returns the innermost section of the user's program, or None."""
        if self.name == "slow":
            return self
        return self.outer.section if self.outer else None


class Phases:
    """The phases of a process.

    Args:
        clock: Returns the time in seconds. Tests replace it.

    Attributes:
        now: The current phase.
        steps: The number of executions of steps so far.
        exchanges: The number of exchanges so far.
        traces: The number of traces of a step so far.
        longest: The longest wait in seconds, without first executions.
        fetching: Returns whether the current step waits for its own data.
        watched: Whether a thread watches the waits.
        readers: Functions that are called with the new activity when it changes, by name.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.now = self._outside = Phase("", "", "", clock())
        self.steps = self.exchanges = self.traces = 0
        self.longest = 0.0
        self.fetching: Callable[[], bool] = lambda: False
        self.watched = False
        self.readers: dict[str, Callable[[str], None]] = {}
        self._thread: int | None = None  # the thread that is in a phase
        self._traced = 0  # the traces at the begin of the current wait

    def enter(self, name: str, label: str, is_first: bool, seconds: float | None) -> Phase | None:
        """Begins a phase and returns it; returns None without an effect within a wait, and in another thread than that of the current phase."""
        outer = self.now
        thread = threading.get_ident()
        # A thread of the user's, or of a library, must not change the phase that the watch reads.
        if outer.is_wait or self._thread not in (None, thread):
            return None
        activity = outer.activity if name in (*WAITS, "slow", "call") else name
        if name == "step":
            self.steps += 1
            activity = "compiling" if is_first else activity
        elif name == "exchange":
            self.exchanges += 1
        self._thread = thread
        self._traced = self.traces
        self._change(Phase(name, activity, label, self._clock(), is_first, seconds, outer))
        return self.now

    def leave(self, phase: Phase) -> None:
        """Ends a phase that `enter` has returned."""
        if phase.is_wait and not self.is_first:
            self.longest = max(self.longest, self._clock() - phase.since)
        outer = phase.outer or self._outside
        if outer is self._outside:
            self._thread = None
        self._change(outer)

    def _change(self, phase: Phase) -> None:
        before = self.now
        self.now = phase
        if phase.activity != before.activity:
            # A copy: a reader may be set by another thread meanwhile.
            for read in [*self.readers.values()]:
                read(phase.activity)

    @property
    def is_first(self) -> bool:
        """Returns whether the current phase may compile: it is a first execution, or has traced its function again."""
        phase = self.now
        return phase.is_first or (phase.is_wait and self.traces != self._traced)

    def waited(self) -> float:
        """Returns the seconds of the current wait; 0 outside of waits."""
        phase = self.now
        return self._clock() - phase.since if phase.is_wait else 0.0

    def long_wait(self, least: float = _LEAST) -> float:
        """Returns the seconds from which a wait is long: 5 times the longest wait so far, at least `least`."""
        return max(least, _FACTOR * self.longest)


class phase:
    """Context in which this process is in a phase. An error that leaves the context gets the labels of the phase in which it was raised.

    Args:
        name: As in `Phase`.
        label: As in `Phase`.
        is_first: As in `Phase`.
        seconds: As in `Phase`.
        phases: The phases of the process. Tests replace them.
    """

    __slots__ = ("_arguments", "_entered", "_phases")

    def __init__(
        self,
        name: str,
        label: str = "",
        is_first: bool = False,
        seconds: float | None = None,
        phases: Phases | None = None,
    ):
        self._phases = main if phases is None else phases
        self._arguments = name, label, is_first, seconds
        self._entered: Phase | None = None

    def __enter__(self) -> None:
        self._entered = self._phases.enter(*self._arguments)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = self._entered
        if entered is None:
            return
        if error is not None and not hasattr(error, _LABELS):
            try:
                setattr(error, _LABELS, entered.labels)
            except AttributeError:  # an exception with slots
                pass
        self._phases.leave(entered)


_LABELS = "_tfdist_labels"


def labels(error: BaseException) -> list[str]:
    """Returns the labels of the phases in which an error was raised, from the outside in."""
    return list(getattr(error, _LABELS, main.now.labels))


def slow(name: str, seconds: float) -> contextlib.AbstractContextManager[Any]:
    """Returns a context for a part of your program that is slow on this task, while other tasks may wait for it.

    Without it, a task that the others wait for ends the job after `Trainer(timeout_seconds=...)`, 1,800 s by default.

    Args:
        name: The name of the part; the warnings of the waiting tasks show it.
        seconds: Its limit in seconds, from its begin. 0 means no limit.

    Raises:
        ConfigError: `name` is no text, or `seconds` is no number of at least 0.

    Examples:
        >>> import tfdist
        >>> with tfdist.slow("upload", seconds=3600):
        ...     pass
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"slow: name must be a text, such as 'upload'. Received: {format_value(name)}.")
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds < 0:
        raise ConfigError(
            f"slow: seconds must be a number of at least 0, where 0 means no limit. Received: {format_value(seconds)}."
        )
    return phase("slow", label=name, seconds=float(seconds))


main = Phases()
