"""Reports of a task's activity, by which the tasks that wait for it tell slow from stuck. No TensorFlow here.

A `Reporter` looks at its own process every few seconds: whether the program is at another line, and whether its threads have worked.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable

from tfdist.runtime.report import stacks, work
from tfdist.runtime.report.phase import Phases, main

TIMEOUT_SECONDS = 1800.0  # the default of `Trainer(timeout_seconds=...)`
IDLE_SHARE = 3.0  # a task that does nothing may take this part of the limit: 600 s
# The building of a model, a first execution, saving and evaluating may take this multiple of the limits.
PATIENCE = 10.0
_PATIENT = ("building", "compiling", "saving", "validation", "prediction")
_READ_WITHIN = 1.0  # seconds to read a variable, which may wait for TensorFlow
# File and function in which a thread waits for the debugger's user: of pdb and its subclasses, as IPython's, and of debugpy.
_DEBUGGERS = {("pdb.py", "interaction"), ("pydevd.py", "do_wait_suspend")}
_WORDS = {"building": "builds a model", "saving": "saves", "validation": "evaluates", "prediction": "predicts"}


@dataclasses.dataclass
class Report:
    """Report of a task's activity.

    Attributes:
        number: The number of the task's reports so far.
        state: `"waits"` (for others, in a step or an exchange), `"computes"` (a step), `"data"` (a step waits for this task's own data),
            or `"user"` for anything else.
        wait: `"step"` or `"exchange"`, the kind of its wait.
        activity: As in `Phase`.
        section: The name of the section of `tfdist.slow`, or an empty text.
        place: The line of the user's program, or an empty text.
        asks: Whether its wait is so long that it asks what the others do.
        steps: The number of executions of steps that it has begun.
        exchanges: The number of exchanges that it has begun.
        waited: The seconds of its current wait.
        idle: The seconds without a sign of work.
        is_first: Whether it may compile.
        seconds_left: The seconds until the limit of its section, None without a section or a limit.
        debugs: Whether a debugger has stopped it.
        is_silent: Whether it has made no report for some time.
        transferred: The bytes that it has sent and received over the network.
    """

    number: int = 0
    state: str = "user"
    wait: str = ""
    activity: str = ""
    section: str = ""
    place: str = ""
    asks: bool = False
    steps: int = 0
    exchanges: int = 0
    waited: float = 0.0
    idle: float = 0.0
    is_first: bool = False
    seconds_left: float | None = None
    debugs: bool = False
    is_silent: bool = False
    transferred: int = 0

    @property
    def call(self) -> tuple[str, int, int]:
        """The collective in which it waits."""
        return self.wait, self.steps, self.exchanges

    @property
    def patience(self) -> float:
        """The multiple of the limits that applies to it."""
        return PATIENCE if self.is_first or self.activity in _PATIENT else 1.0

    def overrun(self, waited: float, timeout_seconds: float) -> str:
        """Returns a sentence about the limit that this task exceeds, or an empty text.

        Args:
            waited: How long others have waited for it, in seconds.
            timeout_seconds: `Trainer(timeout_seconds=...)`; 0 means no limit.
        """
        if not timeout_seconds or self.debugs:
            return ""
        if self.section:
            is_over = self.seconds_left is not None and self.seconds_left < 0
            return "The limit of its section, tfdist.slow(seconds=...), is over" if is_over else ""
        limit = timeout_seconds * self.patience
        if waited > limit:
            return f"The limit is {limit:.0f} s"
        idle_limit = limit / IDLE_SHARE
        if min(self.idle, waited) > idle_limit:
            return f"For {self.idle:.0f} s it has neither computed nor read nor written a file; the limit is {idle_limit:.0f} s"
        return ""

    def describe(self) -> str:
        """Returns the task's activity, in words that follow its name."""
        at = f" at {self.place}" if self.place else ""
        if self.is_silent:
            return f"reports no more, and was{at}" if at else "reports no more"
        if self.debugs:
            return f"is in a debugger{at}"
        if self.section:
            return f"is in the section {self.section!r}{at}"
        if self.state == "data":
            return f"waits for its data{at}" if at else "waits for data in its input pipeline"
        if self.state == "waits":
            where = f"step {self.steps}" if self.wait == "step" else f"an exchange after step {self.steps}"
            return f"waits in {where}{at}"
        if self.state == "computes":
            return f"is in its first step{at}" if self.is_first else f"computes step {self.steps}{at}"
        if self.activity in _WORDS:
            return f"{_WORDS[self.activity]}{at}"
        return f"is{at}" if at else "is outside of a step"


class Reporter:
    """Makes the reports of this process."""

    def __init__(self, phases: Phases = main):
        self._phases = phases
        self._number = 0
        self._place = ""
        self._threads = work.threads()
        self._looked = self._worked = time.monotonic()

    def report(self, warn_after: float) -> Report:
        """Returns the report of this task now. It covers the time since the call before, which should be some seconds ago.

        `warn_after` is the number of seconds from which a wait is long, if no wait before has been long.
        """
        phase = self._phases.now
        now = time.monotonic()
        threads = work.threads()
        computes = work.has_computed(self._threads, threads, now - self._looked, threading.main_thread().native_id)
        main_stack, others = stacks.own_stacks()
        called = stacks.called_place(others)
        state = "user"
        place = stacks.place(main_stack, others)
        if phase.is_wait:
            state = "computes" if computes or called else "waits"
            # A step that waits for its own data keeps the others waiting: it is not one that waits for them.
            if phase.name == "data" or (phase.name == "step" and _read_briefly(self._phases.fetching)):
                state = "data"
                place = stacks.data_place(others)
        # A program at another line has worked, even if it has only waited for a server since.
        if place != self._place or work.has_worked(self._threads, threads, now - self._looked):
            self._worked = now
        self._place = place
        self._threads = threads
        self._looked = now
        self._number += 1
        report = Report(
            self._number,
            state,
            activity=phase.activity,
            place=place,
            asks=self._phases.waited() > self._phases.long_wait(warn_after),
            steps=self._phases.steps,
            exchanges=self._phases.exchanges,
            waited=self._phases.waited(),
            idle=now - self._worked,
            is_first=self._phases.is_first,
            debugs=in_debugger(),
        )
        if phase.is_wait:
            report.wait = phase.name
            report.transferred = work.sent_and_received()
        if phase.section:
            report.section = phase.section.label
            if phase.section.seconds:
                report.seconds_left = phase.section.since + phase.section.seconds - now
        return report


def in_debugger() -> bool:
    """Returns whether the main thread is stopped in pdb, IPython's debugger or debugpy now.

    debugpy stops all threads but those with the attributes `pydev_do_not_trace` and `is_pydev_daemon_thread`, so only such a
    thread can see that debugpy has stopped the main thread.
    """
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.StackSummary.extract(traceback.walk_stack(innermost), lookup_lines=False) if innermost else []
    return any((os.path.basename(frame.filename), frame.name) in _DEBUGGERS for frame in stack)


def _read_briefly(read: Callable[[], bool]) -> bool:
    """Returns the result of a function, or False if it takes over a second or raises an error."""
    results: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(read())
        except Exception:  # the training raises it
            pass

    threading.Thread(target=run, daemon=True, name="tfdist-read").start()
    try:
        return results.get(timeout=_READ_WITHIN)
    except queue.Empty:
        return False
