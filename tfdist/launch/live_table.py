"""A table of the tasks in a terminal, below the lines that they print: each task's step, speed, remaining time and metrics. No TensorFlow here."""

from __future__ import annotations

import collections
import io
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from rich import console, constrain, live, table, text

from tfdist.cluster import TaskSpec
from tfdist.runtime.log import is_terminal
from tfdist.runtime.report import progress

_EVERY = 0.25  # seconds between two looks
_RATE_SECONDS = 10.0  # over which steps per second are measured
_NUMBERS = ("epoch", "step", "steps/s", "time left")  # names of columns
_ANY_WIDTH = 10_000


def is_possible() -> bool:
    """Returns whether standard output is a terminal that can redraw lines."""
    return is_terminal() and console.Console().is_interactive


class Pace:
    """The pace of one task, from repeated observations of its step.

    Attributes:
        rate: Steps per second in the last 10 s; None before a second observation.
        seconds_left: Seconds until the last step, at the mean pace since the first step, validations included; None if unknown.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.rate: float | None = None
        self.seconds_left: float | None = None
        self._looks: collections.deque[tuple[float, int]] = collections.deque()
        self._start: tuple[float, int] | None = None  # after the first step, which includes a compilation

    def look(self, now: float, steps: progress.Progress) -> None:
        """Records the task's steps at a time."""
        before = self._looks[-1][1] if self._looks else steps.done
        if steps.done < before:  # another training has begun
            self._begin()
        elif steps.done > before and self._start is None:
            self._looks.clear()
            self._start = (now, steps.done)
        self._looks.append((now, steps.done))
        while now - self._looks[0][0] > _RATE_SECONDS:
            self._looks.popleft()
        if self._start is None:
            return
        oldest, oldest_step = self._looks[0]
        if now > oldest:
            self.rate = (steps.done - oldest_step) / (now - oldest)
        start, start_step = self._start
        done = steps.done - start_step
        elapsed = now - start
        if steps.total and done and elapsed > 0:
            self.seconds_left = max(0, steps.total - steps.done) * elapsed / done


class _Screen(io.StringIO):
    """A buffer for the terminal at standard output, with its encoding."""

    encoding = property(lambda self: sys.stdout.encoding)

    def isatty(self) -> bool:
        return True

    def take(self) -> bytes:
        """Returns the output since the last call."""
        shown = self.getvalue().encode(sys.stdout.encoding, "backslashreplace")
        self.seek(0)
        self.truncate()
        return shown


class LiveTable:
    """The table, and the lines above it, for standard output; `is_possible` must hold. Methods return the text to write.

    Args:
        tasks: The tasks.
        servers: The tasks that only serve others and have no steps.
        folder: The folder in which tasks write their progress.
    """

    def __init__(self, tasks: Sequence[TaskSpec], servers: Collection[TaskSpec], folder: str):
        self._tasks = tasks
        self._servers = servers
        self._folder = folder
        self._paces = {task: Pace() for task in tasks}
        self._due = 0.0
        self._screen = _Screen()
        self._console = console.Console(file=self._screen, markup=False, emoji=False, highlight=False)
        self._any_width = self._console.options.update_width(_ANY_WIDTH)
        # transient: only the lines remain on the screen. No thread: each frame erases the previous one, so no frame may be lost.
        self._live = live.Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def refresh(
        self, lines: Sequence[bytes], running: Collection[TaskSpec], restarting: Collection[TaskSpec], ending: bool
    ) -> bytes:
        """Returns the text that shows new lines and the state of the tasks.

        Args:
            lines: The lines.
            running: The tasks that run.
            restarting: The tasks that will be restarted.
            ending: Whether the tasks have been asked to end.
        """
        self._print(lines)
        now = time.monotonic()
        if now < self._due:
            return self._screen.take()
        self._due = now + _EVERY
        records = {task: progress.read(self._folder, task.name) for task in self._tasks}
        rows = [self._row(task, record, now, running, restarting, ending) for task, record in records.items()]
        metrics = [record.metrics for record in records.values()]
        names = sorted(dict.fromkeys(name for values in metrics for name in values), key=lambda name: name != "loss")
        # A terminal echoes ^C after the table. After a full line the echo would start a new line, which would not be erased.
        width = max(1, self._console.width - 4)
        shown = self._table_of(rows, metrics, names)
        while names and self._console.measure(shown, options=self._any_width).maximum > width:
            names.pop()
            shown = self._table_of(rows, metrics, names)
        self._live.update(constrain.Constrain(shown, width), refresh=True)
        return self._screen.take()

    def _table_of(
        self, rows: Sequence[Sequence[str]], metrics: Sequence[Mapping[str, str]], names: Sequence[str]
    ) -> table.Table:
        """Returns the table, with a column for each of the metrics `names`."""
        room = max(1, self._console.height // 2 - 2)
        shown = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("task", "state"):
            shown.add_column(name, no_wrap=True)
        for name in (*_NUMBERS, *names):
            shown.add_column(name, no_wrap=True, justify="right")
        for row, values in list(zip(rows, metrics, strict=True))[:room]:
            shown.add_row(*row, *(values.get(name, "") for name in names))
        if len(rows) > room:
            shown.add_row("...", f"{len(rows) - room} more tasks")
        return shown

    def stop(self, lines: Sequence[bytes]) -> bytes:
        """Returns the text that shows the last lines, removes the table and shows the cursor."""
        self._print(lines)
        self._live.stop()
        return self._screen.take()

    def _print(self, lines: Sequence[bytes]) -> None:
        if lines:
            self._console.print(text.Text(b"\n".join(lines).decode(errors="replace")), soft_wrap=True)

    def _row(
        self,
        task: TaskSpec,
        steps: progress.Progress,
        now: float,
        running: Collection[TaskSpec],
        restarting: Collection[TaskSpec],
        ending: bool,
    ) -> list[str]:
        if task not in running:
            state = "restarting" if task in restarting else "ended"
        elif ending:
            state = "ending"
        elif not steps.begun:
            state = "serving" if task in self._servers else "starting"
        else:
            state = _state(task, steps)
        if not steps.begun:
            self._paces[task] = Pace()
            return [str(task), state, "", "", "", ""]
        pace = self._paces[task]
        if state == "training":
            pace.look(now, steps)
        rate = ""
        left = ""
        if state == "training" and pace.rate is not None:
            rate = f"{pace.rate:.1f}"
            left = _duration(pace.seconds_left)
        epoch = _of(steps.epoch, steps.epochs) if steps.epoch else ""
        return [str(task), state, epoch, _of(steps.done, steps.total), rate, left]


def _state(task: TaskSpec, steps: progress.Progress) -> str:
    if task.type == "evaluator":
        return "evaluating"
    if steps.activity:
        return steps.activity
    if 0 < steps.total <= steps.done:
        return "finishing"
    return "training"


def _of(number: int, last: int) -> str:
    return f"{number}/{last}" if last else str(number)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{remainder:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{remainder:02}"
