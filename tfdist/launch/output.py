"""What tasks print, line by line behind their names, on the launcher's output. No TensorFlow here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Sequence
from typing import IO

from tfdist.cluster import TaskSpec
from tfdist.launch import line_kinds, live_table
from tfdist.launch.process import TaskProcess

# A traceback is held back for this long: its task may be about to fail, and then the launcher decides what to show of it.
_HOLD_SECONDS = 3.0
_TRACEBACK = b"Traceback (most recent call last):"
_REMEMBERED_WARNINGS = 1000


class LauncherOutput:
    """The launcher's output: the lines of its tasks, and its own messages.

    Args:
        stream: Where lines go. None means this process's standard output.
    """

    def __init__(self, stream: IO[bytes] | None):
        self._stream = stream or sys.stdout.buffer
        self._has_table = stream is None and live_table.is_possible()
        self._table: live_table.LiveTable | None = None
        self._warnings: dict[
            bytes, tuple[bytes, int]
        ] = {}  # by what they say: the line as shown, and how many followed
        self._repeated: dict[TaskProcess, bytes] = {}  # tasks whose last line was a repeated warning

    def start_table(self, tasks: Sequence[TaskSpec], servers: Collection[TaskSpec], folder: str) -> None:
        """Shows a table of the tasks below their lines, in a terminal that allows it. Arguments as for `LiveTable`."""
        if self._has_table:
            self._table = live_table.LiveTable(tasks, servers, folder)

    def refresh(self, running: Collection[TaskSpec], restarting: Collection[TaskSpec], ending: bool) -> None:
        """Shows what has come since, and what tasks do. Arguments as for `LiveTable`."""
        if self._table:
            try:
                self._table.refresh(running, restarting, ending)
            except (OSError, ValueError):
                self._give_up()

    def stop_table(self) -> None:
        """Removes the table; call it whatever happens, or the cursor stays hidden."""
        if self._table:
            try:
                self._table.stop()
            except (OSError, ValueError):
                self._give_up()
            self._table = None

    def forward(self, task: TaskProcess) -> None:
        """Prints the complete lines that a task has written since, and holds a traceback back."""
        for line in task.read():
            if task.held or line.startswith(_TRACEBACK):
                task.held_since = task.held_since if task.held else time.monotonic()
                task.held.append(line)
            elif not self._is_repeated(task, line):
                self._print(task, line)
        if task.log_fault:
            self.say(
                f"cannot write {task.log_path}: {task.log_fault.strerror}; what {task.spec} says is shown here alone"
            )
            task.log_fault = None

    def count_warnings(self) -> None:
        """Says how often warnings were repeated that have been shown once."""
        for line, more in self._warnings.values():
            if more:
                self._write(f"tfdist: {more} more line{'s' if more > 1 else ''} like: ".encode() + line)
        self._warnings = {}

    def _is_repeated(self, task: TaskProcess, line: bytes) -> bool:
        """Whether a line is a warning that any task has given before, or the code below such a one."""
        warning = self._repeated.pop(task, None)
        if warning and line_kinds.is_source_of(warning, line):
            return True
        if (text := line_kinds.warning_text(line)) is None:
            return False
        if text in self._warnings:
            shown, more = self._warnings[text]
            self._warnings[text], self._repeated[task] = (shown, more + 1), line
            return True
        if len(self._warnings) < _REMEMBERED_WARNINGS:
            self._warnings[text] = (f"[{task.spec}] ".encode() + line, 0)
        return False

    def release(self, task: TaskProcess) -> None:
        """Prints the lines of a task that are held back."""
        for line in task.held:
            self._print(task, line)
        task.held = []

    def release_expired(self, task: TaskProcess) -> None:
        """Prints the lines of a task that have been held back for long enough: the task has not failed."""
        if task.held and time.monotonic() - task.held_since > _HOLD_SECONDS:
            self.release(task)

    def say(self, message: str) -> None:
        """Prints a message of the launcher."""
        self._write(f"tfdist: {message}".encode())

    def _print(self, task: TaskProcess, line: bytes) -> None:
        self._write(f"[{task.spec}] ".encode() + line)

    def _write(self, line: bytes) -> None:
        if self._table:
            self._table.write(line)
            return
        try:
            self._stream.write(line + b"\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        # Nobody reads any more (`| head`), or the disk is full; the logs still have everything.
        self._table = None
        self._stream = open(os.devnull, "wb")  # noqa: SIM115 (for the rest of the run)
