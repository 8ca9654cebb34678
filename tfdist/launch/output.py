"""The launcher's output: the lines of its tasks behind their names, and its own messages. No TensorFlow here."""

from __future__ import annotations

import codecs
import collections
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
from tfdist.launch import live_table, process
from tfdist.launch.process import TaskProcess
from tfdist.runtime import process_end
from tfdist.runtime.files import write_error_reason

# A traceback is held back for this long: its task may be about to fail, and then the launcher decides what to show of it.
_HOLD_SECONDS = 3.0
_TRACEBACK = b"Traceback (most recent call last):"
_REMEMBERED_WARNINGS = 1000
_OWN = b"tfdist: "  # how the launcher's own lines begin
_INTERRUPTED = _OWN + process_end.INTERRUPTED.encode()
_MOST_WAITING = 1 << 22  # bytes of lines that wait for the reader; of more, the tasks' oldest are left out
# How long the end waits for the reader, in seconds: since it last took something, in all, and in all after a signal.
_LAST_WAIT, _LONGEST_LAST_WAIT, _LAST_WAIT_AFTER_SIGNAL = 2.0, 30.0, 0.5
_TURN = 0.02  # seconds between two looks at the writer
_DRAIN_SECONDS = 1.0  # for which the end of a task's output is waited for: what it has left behind may have it open
_PIECE = 4096  # bytes of one write: a blocking write of more returns only when the reader has taken nearly all of it


class LauncherOutput:
    """Prints tasks' lines and the launcher's messages, and never waits for its reader.

    Lines that the reader is slow to take wait in memory; if they are too many, the tasks' oldest are dropped and counted.

    Args:
        stream: Where lines go. None means this process's standard output.
        log_dir: Where the logs are, for the message of how many lines were left out.

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
        self._spared: list[bytes] = []  # the launcher's own lines among those left out
        self._left_out = 0
        self._has_table = stream is None and live_table.is_possible()
        self._table: live_table.LiveTable | None = None
        # By what warnings have in common: the line as shown, and how many followed.
        self._warnings: dict[bytes, tuple[bytes, int]] = {}
        self._repeated: dict[TaskProcess, bytes] = {}  # tasks whose last line was a repeated warning

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
            signals: Returns how many signals have come. After one, the wait for the reader is short; another one ends it.
        """
        before, moved = signals(), self._writer.moved_at
        longest = _LAST_WAIT_AFTER_SIGNAL if before else _LONGEST_LAST_WAIT
        # In turns, not by the clock: where this process is kept waiting, its writer is, too, and the reader not to blame.
        waited = still = 0.0
        while not self._writer.is_broken and (self._table or self._waiting or not self._writer.is_idle):
            if self._writer.moved_at != moved:
                moved, still = self._writer.moved_at, 0.0
            if waited >= longest or still >= _LAST_WAIT or signals() > before:
                break
            if self._writer.is_idle and self._table:
                self._writer.write(self._table.stop(self._take_lines()))
                self._table = None
            self._flush()
            self._writer.wait(_TURN)
            waited, still = waited + _TURN, still + _TURN

    def drain(self, task: TaskProcess) -> None:
        """Prints the last output of a task that has ended."""
        deadline, last = time.monotonic() + _DRAIN_SECONDS, False
        while task.open and not last:
            # All that it has written fits in its pipe: it is read once, however late this process comes to that.
            last = time.monotonic() >= deadline
            self.forward(task, last)
            if task.open and not last:
                time.sleep(0.005)

    def forward(self, task: TaskProcess, last: bool = False) -> None:
        """Prints the complete lines that a task has written since, and holds a traceback back. Arguments as for `TaskProcess.read`."""
        for line in task.read(last):
            if task.held or line.startswith(_TRACEBACK):
                task.held_since = task.held_since if task.held else time.monotonic()
                task.held.append(line)
            elif not self._is_repeated(task, line) and not (self.is_interrupted and line.startswith(_INTERRUPTED)):
                self._print(task, line)
        if task.log_fault:
            self.say(
                f"cannot write {task.log_path}: {task.log_fault.strerror}; what {task.spec} says is shown here alone"
            )
            task.log_fault = None

    def count_warnings(self) -> None:
        """Prints how often warnings were repeated that were shown once."""
        for line, more in self._warnings.values():
            if more:
                self._write(f"tfdist: {more} more line{'s' if more > 1 else ''} like: ".encode() + line)
        self._warnings = {}

    def _is_repeated(self, task: TaskProcess, line: bytes) -> bool:
        """Returns whether a line is a warning that any task has given before, or the code below such a one."""
        warning = self._repeated.pop(task, None)
        if warning and process.is_source_of(warning, line):
            return True
        if (text := process.warning_text(line)) is None:
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

    def attempt(self, path: str | os.PathLike[str], action: Callable[..., object], *arguments: object) -> bool:
        """Calls a function that writes files; after an error it warns once and returns False, as tasks need not end for it."""
        try:
            action(*arguments)
        except OSError as e:
            if path not in self._faulty:
                self._faulty.add(path)
                self.say(f"cannot write in {os.fspath(path)}: {write_error_reason(e)}; the tasks go on. Free the disk")
            return False
        return True

    def say(self, message: str) -> None:
        """Prints a message of the launcher."""
        self._write(_OWN + printable(message).encode())

    def _print(self, task: TaskProcess, line: bytes) -> None:
        self._write(f"[{task.spec}] ".encode() + line)

    def _write(self, line: bytes) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        while self._waiting_bytes > _MOST_WAITING:
            oldest = self._waiting.popleft()
            self._waiting_bytes -= len(oldest)
            if oldest.startswith(_OWN):  # which no log has
                self._spared.append(oldest)
            else:
                self._left_out += 1
        self._flush()

    def _flush(self) -> None:
        """Writes the lines that wait, unless the table's next refresh does that or the reader is not ready."""
        if self._table is None and self._writer.is_idle:
            self._writer.write(b"".join(line + b"\n" for line in self._take_lines()))

    def _take_lines(self) -> list[bytes]:
        """Returns the lines that wait, and waits with none."""
        lines = [*self._spared, *self._waiting]
        if self._left_out:
            message = (
                f"{self._left_out} lines of tasks were left out here, as nobody read them; {self._log_dir} has them"
            )
            lines.insert(0, _OWN + message.encode())
        self._spared, self._left_out, self._waiting_bytes = [], 0, 0
        self._waiting.clear()
        return lines


def _standard_output() -> IO[bytes] | None:
    if sys.stdout is None:  # it was closed before the start
        return None
    return getattr(sys.stdout, "buffer", None) or io.BufferedWriter(_TextOutput(sys.stdout))


class _TextOutput(io.RawIOBase):
    """A stream of bytes to one of text: a notebook's standard output has no bytes."""

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
    """Writes one chunk at a time to a stream, in a thread, so that a reader that stalls holds up nobody else.

    The stream's own mode stays as it is: other programs share a terminal.

    Args:
        stream: Where to write. None means nowhere: standard output is closed.

    Attributes:
        is_broken: Whether a write has failed: the reader has gone, or the disk is full.
        moved_at: When the reader has last taken something, by `time.monotonic()`.
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
                self._descriptor = stream.fileno()  # a thread that is stuck in the stream itself would hold its lock
        except (OSError, ValueError):  # a stream in memory, or one that is closed
            pass

    @property
    def is_idle(self) -> bool:
        """True if everything has been written."""
        return self._thread is None or not self._thread.is_alive()

    def write(self, chunk: bytes) -> None:
        """Begins to write a chunk; only when idle."""
        if chunk and not self.is_broken:
            self.moved_at = time.monotonic()
            # Daemonic: the process may end while the thread waits for the reader.
            self._thread = threading.Thread(target=self._write, args=(chunk,), name="output", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Waits until the writer is idle, for some seconds at most."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _write(self, chunk: bytes) -> None:
        try:
            if self._descriptor is None:
                assert self._stream is not None  # noqa: S101 (for the type checker: else it is broken)
                self._stream.write(chunk)
                self._stream.flush()
                return
            rest = memoryview(chunk)
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest[:_PIECE]) :]
                except BlockingIOError:  # another program has made the terminal non-blocking
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
                self.moved_at = time.monotonic()
        except (OSError, ValueError):
            self.is_broken = True
