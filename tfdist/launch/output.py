"""What tasks print, line by line behind their names, on the launcher's output. No TensorFlow here."""

from __future__ import annotations

import os
import sys
import time
from typing import IO

from tfdist.launch.process import TaskProcess

# A traceback is held back for this long: its task may be about to fail, and then the launcher decides what to show of it.
_HOLD_SECONDS = 3.0
_TRACEBACK = b"Traceback (most recent call last):"


class LauncherOutput:
    """The launcher's output: the lines of its tasks, and its own messages.

    Args:
        stream: Where lines go. None means this process's standard output.
    """

    def __init__(self, stream: IO[bytes] | None):
        self._stream = stream or sys.stdout.buffer

    def forward(self, task: TaskProcess) -> None:
        """Prints the complete lines that a task has written since, and holds a traceback back."""
        for line in task.read():
            if task.held or line.startswith(_TRACEBACK):
                task.held_since = task.held_since if task.held else time.monotonic()
                task.held.append(line)
            else:
                self._print(task, line)
        if task.log_fault:
            self.say(
                f"cannot write {task.log_path}: {task.log_fault.strerror}; what {task.spec} says is shown here alone"
            )
            task.log_fault = None

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
        try:
            self._stream.write(line + b"\n")
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody reads any more (`| head`), or the disk is full; the logs still have everything.
            self._stream = open(os.devnull, "wb")  # noqa: SIM115 (for the rest of the run)
