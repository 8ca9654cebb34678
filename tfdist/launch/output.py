"""The launcher's output: the lines of its tasks behind their names, and its own messages. No TensorFlow here."""

from __future__ import annotations

import codecs
import collections
import dataclasses
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any, TextIO

from tfdist.cluster import TaskSpec
from tfdist.errors import printable
from tfdist.launch import live_table
from tfdist.launch.process import TaskProcess
from tfdist.runtime.end import interrupts
from tfdist.runtime.files import write_error_reason
from tfdist.runtime.tensorflow_log import reports_lost_task

# Seconds for which a traceback, or TensorFlow's report of a lost task, is held back: if its task fails, the launcher decides whether to print it.
_HOLD_SECONDS = 3.0
# The same for a task that has reported the loss of another one: TensorFlow's shutdown takes seconds.
_HOLD_SECONDS_OF_LOSS = 30.0
_TRACEBACK = b"Traceback (most recent call last):"
_IGNORED = b"Exception ignored in: "
_REMEMBERED_WARNINGS = 1000
_OWN = b"tfdist: "  # the start of the launcher's own lines
# What tasks print after Ctrl-C outside of a traceback: tfdist, and Python if it has not yet started.
_INTERRUPTED = (_OWN + interrupts.MESSAGE.encode(), b"Fatal Python error: init_", b"Python runtime state: ")
_MOST_WAITING = 1 << 22  # bytes of lines that wait for the reader; beyond that, the tasks' oldest lines are dropped
# Seconds that `close` waits for the reader: since its last read, in total, and in total after a signal.
LAST_WAIT = 2.0
_LONGEST_LAST_WAIT = 30.0
_LAST_WAIT_AFTER_SIGNAL = 0.5
_TURN = 0.02  # seconds between two looks at the writer
# Limit of the wait for the end of a task's output: processes that the task started may keep the pipe open.
_DRAIN_SECONDS = 1.0
_PIECE = 4096  # bytes of one write: a blocking write of more returns only when the reader has taken nearly all of it


@dataclasses.dataclass
class _Warning:
    """A warning: its line as it was printed first, Python's line of code below it, and the number of its repetitions."""

    first: bytes
    code: bytes = b""
    more: int = 0


class LauncherOutput:
    """Prints tasks' lines and the launcher's messages, and never waits for its reader.

    Lines that the reader is slow to take wait in memory; if they are too many, the tasks' oldest are dropped and counted.

    Args:
        stream: The stream to write to. None means this process's standard output.
        log_dir: The folder of the logs, for the message about dropped lines.

    Attributes:
        is_interrupted: Whether Ctrl-C was pressed and reported: the tasks' own messages about it are not shown.
    """

    def __init__(self, stream: IO[bytes] | None, log_dir: str | os.PathLike[str]):
        self._writer = BackgroundWriter(stream or _standard_output())
        self._log_dir = log_dir
        self.is_interrupted = False
        self._faulty: set[str | os.PathLike[str]] = set()  # folders in which something could not be written
        self._waiting: collections.deque[bytes] = collections.deque()
        self._waiting_bytes = 0
        self._spared: list[bytes] = []  # the launcher's own lines among the dropped ones
        self._left_out = 0
        self._asking: TaskProcess | None = None  # the task that waits behind its prompt, the last line of the screen
        self._prompt = b""
        self._is_asked = False  # whether the prompt is written
        self._has_table = stream is None and live_table.is_possible()
        self._table: live_table.LiveTable | None = None
        self._warnings: dict[bytes, _Warning] = {}  # by their lines
        self._above: dict[TaskProcess, _Warning] = {}  # the warning in each task's last line

    def start_table(self, tasks: Sequence[TaskSpec], servers: Collection[TaskSpec], folder: str) -> None:
        """Shows a table of the tasks below their lines, in a terminal that allows it. Arguments as for `LiveTable`."""
        if self._has_table:
            self._table = live_table.LiveTable(tasks, servers, folder)

    def refresh(self, running: Collection[TaskSpec], restarting: Collection[TaskSpec], ending: bool) -> None:
        """Shows new lines and the state of the tasks. Arguments as for `LiveTable`."""
        if not self._writer.is_idle:
            return
        if self._table:
            self._writer.write(self._table.refresh(self._take_lines(), running, restarting, ending))
        else:
            self._flush()

    def close(self, signals: Callable[[], int]) -> None:
        """Removes the table and writes the remaining lines. Always call it, or the cursor stays hidden.

        Args:
            signals: Returns the number of signals received. After one signal the wait for the reader is short; another ends it.
        """
        before = signals()
        moved = self._writer.moved_at
        longest = _LAST_WAIT_AFTER_SIGNAL if before else _LONGEST_LAST_WAIT
        # Count turns, not time: if this process was stopped or starved, its writer was, too, and the reader is not the cause.
        waited = still = 0.0
        while not self._writer.is_broken and (self._table or self._waiting or not self._writer.is_idle):
            if self._writer.moved_at != moved:
                moved = self._writer.moved_at
                still = 0.0
            if waited >= longest or still >= LAST_WAIT or signals() > before:
                break
            if self._writer.is_idle and self._table:
                self._writer.write(self._table.stop(self._take_lines()))
                self._table = None
            self._flush()
            self._writer.wait(_TURN)
            waited += _TURN
            still += _TURN

    def drain(self, task: TaskProcess) -> None:
        """Prints the last output of a task that has ended."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        last = False
        while task.open and not last:
            # The task's last output fits in its pipe, so one more read after the deadline gets all of it.
            last = time.monotonic() >= deadline
            self.forward(task, last)
            if task.open and not last:
                time.sleep(0.005)
        if task is self._asking:
            self._asking = None
            self._write(b"")  # ends the prompt's line

    def forward(self, task: TaskProcess, last: bool = False) -> None:
        """Prints a task's new complete lines, and holds back a traceback and reports of a lost task. Arguments as for `TaskProcess.read`."""
        for line in task.read(last):
            if task is self._asking:
                self._asking = None
                self._is_asked = False
            # A traceback may stand behind a prompt, if nobody answered it.
            if task.held or line.endswith(_TRACEBACK) or line.startswith(_IGNORED) or reports_lost_task(line):
                if not task.held:
                    task.held_since = time.monotonic()
                task.held.append(line)
            elif not self._is_repeated(task, line) and not (self.is_interrupted and line.startswith(_INTERRUPTED)):
                self._print(task, line)
        if task.log_fault:
            self.say(
                f"cannot write {task.log_path}: {task.log_fault.strerror}; the output of {task.spec} is only shown here"
            )
            task.log_fault = None

    def ask(self, task: TaskProcess) -> None:
        """Shows the line that a task has begun, such as a debugger's prompt, below all lines until the task writes again."""
        prompt = task.take_prompt()
        if prompt:
            self.release(task)
            self._asking = task
            self._is_asked = False
            self._prompt = _prefix(task) + prompt
            self._flush()

    def count_warnings(self) -> None:
        """Prints the number of repetitions of each warning; the warning itself was printed once."""
        for warning in self._warnings.values():
            lines = "line" if warning.more == 1 else "lines"
            if warning.more:
                self._write(_OWN + f"{warning.more} more {lines} like: ".encode() + warning.first)
        self._warnings = {}

    def _is_repeated(self, task: TaskProcess, line: bytes) -> bool:
        """Returns whether a line is a warning that a task has printed before, or the line of code below such a warning."""
        above = self._above.pop(task, None)
        if above and line.startswith(b"  "):
            is_known = line == above.code
            above.code = above.code or line
            return is_known
        is_of_python = b"Warning: " in line
        if not is_of_python and not line.startswith(b"WARNING:"):  # the form of `logging`
            return False
        warning = self._warnings.get(line)
        if warning:
            warning.more += 1
        elif len(self._warnings) < _REMEMBERED_WARNINGS:
            self._warnings[line] = _Warning(_prefix(task) + line)
        if is_of_python and line in self._warnings:
            self._above[task] = self._warnings[line]
        return warning is not None

    def release(self, task: TaskProcess) -> None:
        """Prints the lines of a task that are held back."""
        for line in task.held:
            self._print(task, line)
        task.held = []

    def release_expired(self, task: TaskProcess) -> None:
        """Prints the lines of a task that have been held back for long enough: the task has not failed."""
        seconds = time.monotonic() - task.held_since
        if task.held and seconds > _HOLD_SECONDS and (seconds > _HOLD_SECONDS_OF_LOSS or not task.loss):
            self.release(task)

    def attempt(self, path: str | os.PathLike[str], action: Callable[..., object], *arguments: object) -> bool:
        """Calls a function that writes files. After an error it warns once per path and returns False, so that tasks continue."""
        try:
            action(*arguments)
        except OSError as e:
            if path not in self._faulty:
                self._faulty.add(path)
                self.say(
                    f"cannot write in {os.fspath(path)}: {write_error_reason(e)}; the tasks continue. Free the disk"
                )
            return False
        return True

    def say(self, message: str) -> None:
        """Prints a message of the launcher."""
        self._write(_OWN + printable(message).encode())

    def _print(self, task: TaskProcess, line: bytes) -> None:
        self._write(_prefix(task) + line)

    def _write(self, line: bytes) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        while self._waiting_bytes > _MOST_WAITING:
            oldest = self._waiting.popleft()
            self._waiting_bytes -= len(oldest)
            if oldest.startswith(_OWN):  # no log contains it
                self._spared.append(oldest)
            else:
                self._left_out += 1
        self._flush()

    def _flush(self) -> None:
        """Writes the waiting lines, unless the table's next refresh writes them or the reader is not ready."""
        if self._table is None and self._writer.is_idle:
            text = b"".join(line + b"\n" for line in self._take_lines())
            # The prompt stays the last line of the screen: below lines that come later it is written again.
            if self._asking and (text or not self._is_asked):
                if self._is_asked:
                    text = b"\n" + text
                if self.is_interrupted:
                    self._asking = None
                else:
                    text += self._prompt
                    self._is_asked = True
            self._writer.write(text)

    def _take_lines(self) -> list[bytes]:
        """Returns the waiting lines and clears them."""
        lines = [*self._spared, *self._waiting]
        if self._left_out:
            message = f"{self._left_out} lines of tasks were dropped here, as the reader was too slow; {self._log_dir} has them"
            lines.insert(0, _OWN + message.encode())
        self._spared = []
        self._left_out = 0
        self._waiting_bytes = 0
        self._waiting.clear()
        return lines


def _prefix(task: TaskProcess) -> bytes:
    return f"[{task.spec}] ".encode()


def _standard_output() -> IO[bytes] | None:
    if sys.stdout is None:  # it was closed before the start
        return None
    return getattr(sys.stdout, "buffer", None) or io.BufferedWriter(_TextOutput(sys.stdout))


class _TextOutput(io.RawIOBase):
    """A byte stream over a text stream: a notebook's standard output accepts only text."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def writable(self) -> bool:
        return True

    def write(self, chunk: Any) -> int:
        self._stream.write(self._decode(bytes(chunk)))
        self._stream.flush()
        return len(chunk)


class BackgroundWriter:
    """Writer of one chunk at a time to a stream, in a thread, so that a stalled reader does not block the launcher.

    The stream stays in blocking mode, because other programs share a terminal.

    Args:
        stream: The stream to write to. None means that standard output is closed, and drops all output.

    Attributes:
        is_broken: Whether a write has failed, because the reader has ended or the disk is full.
        moved_at: The time of the reader's last read, by `time.monotonic()`.
    """

    def __init__(self, stream: IO[bytes] | None):
        self._stream = stream
        self._descriptor: int | None = None
        self._thread: threading.Thread | None = None
        self.is_broken = stream is None
        self.moved_at = 0.0
        try:
            if stream is not None:
                stream.flush()
                self._descriptor = stream.fileno()  # a thread that blocks in the stream object would hold its lock
        except (OSError, ValueError):  # a stream in memory, or a closed one
            pass

    @property
    def is_idle(self) -> bool:
        """True if everything has been written."""
        return self._thread is None or not self._thread.is_alive()

    def write(self, chunk: bytes) -> None:
        """Starts to write a chunk. Call it only while the writer is idle."""
        if chunk and not self.is_broken:
            self.moved_at = time.monotonic()
            # Daemonic: the process may end while the thread waits for the reader.
            self._thread = threading.Thread(target=self._write, args=(chunk,), name="output", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Waits until the writer is idle, at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(self, chunk: bytes) -> None:
        try:
            if self._descriptor is None:
                assert self._stream is not None  # noqa: S101 (for the type checker: else it is broken)
                self._stream.write(chunk)
                self._stream.flush()
                return
            unwritten = memoryview(chunk)
            while unwritten:
                try:
                    unwritten = unwritten[os.write(self._descriptor, unwritten[:_PIECE]) :]
                except BlockingIOError:  # another program has made the terminal non-blocking
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
                self.moved_at = time.monotonic()
        except (OSError, ValueError):
            self.is_broken = True
