"""A task's process: its output, its end, and what it said last. No TensorFlow here."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from tfdist.cluster import TaskSpec

_TAIL_LINES = 20
_LONGEST_LINE = 1 << 16
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")
_COMPLAINT = re.compile(rb"tfdist: |.*\b(error|fatal|fault|aborted|killed|core dumped)\b", re.IGNORECASE)
# TensorFlow's C++ log below errors, and its errors about GPUs that are not there: in the task's log, not on the screen.
# absl's lines of Python code look alike, but for the file's name.
_CHATTER = re.compile(
    rb"[IW]\d{4} [\d:.]+ +\d+ (?!\S+\.py:)|\d{4}-\d\d-\d\d [\d:.]+: [IW] |E\d{4} .*cuInit"
    rb"|WARNING: All log messages before absl|To enable the following instructions: |/job:\w+/replica:\d+/task:\d+$"
)
_COLOURS = re.compile(rb"\x1b\[[\d;]*m|\x08+")
# Keras' progress bar, which is a line of its own for each step where there is no terminal.
_BAR = re.compile(rb"\x1b\[1m\s*(\d+)/(\d+|Unknown)\x1b\[0m ")


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first task that failed.

    Attributes:
        task: Which.
        exit_code: Its exit code, or minus the number of the signal that ended it.
        reason: Its last words, where it has said why: the last line of its traceback, or another complaint.
    """

    task: TaskSpec
    exit_code: int
    reason: str

    @property
    def cause(self) -> str:
        """How it ended: `killed by SIGKILL`, or `exit code 1: ValueError: ...`."""
        if self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        return f"exit code {self.exit_code}" + (f": {self.reason}" if self.reason else "")

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"{self.task} was {self.cause}"
        return f"{self.task} failed with {self.cause}"


class TaskProcess:
    """A running task: its process, its pipe and what of its output is held back."""

    def __init__(
        self, spec: TaskSpec, command: Sequence[str], environ: Mapping[str, str], log_path: pathlib.Path, append: bool
    ):
        self.spec = spec
        self.log_path = log_path
        self.log: IO[bytes] | None = log_path.open("ab" if append else "wb", buffering=0)
        self.log_fault: OSError | None = None
        try:
            self.process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError:
            self.log.close()
            raise
        assert self.process.stdout is not None  # noqa: S101 (for the type checker: it is a pipe)
        self.pipe = self.process.stdout
        os.set_blocking(self.pipe.fileno(), False)
        self.partial = b""
        self.held: list[bytes] = []
        self.held_since = 0.0
        self.tail: list[bytes] = []
        self.open = True
        self.over = False

    def read(self) -> list[bytes]:
        """Returns the complete lines that have come since; notes the end of the output."""
        try:
            chunk = self.pipe.read()
        except OSError:
            chunk = b""
        if chunk is None:
            return []
        if chunk == b"":
            self.open = False
            chunk, self.partial = self.partial, b""
            lines = [chunk] if chunk else []
        else:
            self._keep(chunk)
            *lines, self.partial = (self.partial + chunk).split(b"\n")
            if len(self.partial) > _LONGEST_LINE:
                lines, self.partial = [*lines, self.partial], b""
        shown = [line for line in map(_shown, lines) if line.strip() and not _CHATTER.match(line)]
        self.tail = (self.tail + shown)[-_TAIL_LINES:]
        return shown

    def _keep(self, chunk: bytes) -> None:
        """Writes to the log, until that fails once: a disk that is full is no reason to end a training."""
        if self.log is None:
            return
        try:
            while chunk:
                chunk = chunk[self.log.write(chunk) :]
        except OSError as e:
            with contextlib.suppress(OSError):
                self.log.close()
            self.log, self.log_fault = None, e

    def failures_by_cause(self) -> tuple[bool, float]:
        """Sorts ended tasks: killed ones first, then by the time of their traceback."""
        return (self.process.returncode >= 0, self.held_since or float("inf"))

    def signal(self, number: int) -> bool:
        """Sends a signal to the task and all that it has started; returns whether any of it was there."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Kills what is left of the task, and closes its files."""
        if not self.over:  # else its number may be another's by now
            self.signal(signal.SIGKILL)
        self.process.wait()
        self.pipe.close()
        if self.log:
            self.log.close()


def last_error_line(lines: Sequence[bytes]) -> str:
    """Returns the line that names the exception (TensorFlow's go on after it), or the last complaint, or nothing."""
    named = [line for line in lines if _EXCEPTION.match(line)] or [line for line in lines if _COMPLAINT.match(line)]
    return (named or [b""])[-1].decode(errors="replace").strip()


def _shown(line: bytes) -> bytes:
    """Returns what a terminal would show of a line in the end: nothing of a progress bar that goes on."""
    line = next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
    bar = _BAR.match(line)
    return b"" if bar and bar[1] != bar[2] else _COLOURS.sub(b"", line)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
