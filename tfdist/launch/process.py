"""The process of one task: its environment and its lines of output. No TensorFlow here."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeAlias

from tfdist.cluster import TaskSpec
from tfdist.errors import truncate
from tfdist.launch.failure import Failure, read_failure
from tfdist.runtime.end import process_end
from tfdist.runtime.files import open_own
from tfdist.runtime.report import progress, stacks
from tfdist.runtime.tensorflow_log import is_tensorflow_log

_LOGS = (".log", stacks.SUFFIX)
_LONGEST_LINE = 1 << 16
_CHUNK = 1 << 16  # bytes per read: the size of a pipe
_END_SECONDS = 1.0  # limit of the wait for the end of the process that has waited for a task
_CONTROLS = bytes({*range(32), 127} - {*b"\t"})
_PARAMETERS = bytes(range(0x20, 0x40))  # of an escape code: the next byte is its last one
_BOLD, _PLAIN = b"\x1b[1m", b"\x1b[0m "


class ForkedProcess:
    """A task that the warm spare has forked, with the part of `subprocess.Popen` that the launcher uses.

    Attributes:
        pid: The process id.
        returncode: The exit code, or minus the number of the signal that ended the process; None while it runs.
    """

    def __init__(self, pid: int, report: socket.socket):
        self.pid = pid
        self.returncode: Any = None
        self._report = report

    def poll(self) -> int | None:
        """Returns `returncode`, after a look at the process."""
        return self._receive(0.0)

    def wait(self) -> int | None:
        """Waits for the end of the process, and returns `returncode`."""
        return self._receive(None)

    def _receive(self, seconds: float | None) -> Any:
        if self.returncode is None:
            self._report.settimeout(seconds)
            try:
                # Empty if the process that waits for the task has been killed.
                self.returncode = int(self._report.recv(64) or -signal.SIGKILL)
            except BlockingIOError:
                return None
            # Returns once the process that waited has ended, too, so that no process of the task remains.
            try:
                with self._report:
                    self._report.settimeout(_END_SECONDS)
                    self._report.recv(1)
            except TimeoutError:  # it has nothing left to do, but no processor
                pass
        return self.returncode


Process: TypeAlias = subprocess.Popen[bytes] | ForkedProcess


def spawn(command: Sequence[str], environ: Mapping[str, str], output: int, stdin: int = subprocess.DEVNULL) -> Process:
    """Starts a command as the leader of a new session. `output` is the descriptor for its standard output and error.

    Raises:
        OSError: The command cannot be started.
    """
    return subprocess.Popen(command, env=environ, stdin=stdin, stdout=output, stderr=output, start_new_session=True)


class TaskProcess:
    """A running task: its process, its pipe, its log, and the lines that are held back."""

    def __init__(
        self,
        spec: TaskSpec,
        command: Sequence[str],
        environ: Mapping[str, str],
        log_path: pathlib.Path,
        start: Callable[[Sequence[str], Mapping[str, str], int, int], Process] = spawn,
        stdin: int = subprocess.DEVNULL,
    ):
        self.spec = spec
        self._folder = environ.get(progress.FOLDER, "")
        self.log_path = log_path
        self.log: IO[bytes] | None = None
        self.log_fault: OSError | None = None
        try:
            # An earlier start of this job may have written to it; logs of an earlier job have been set aside.
            self.log = os.fdopen(open_own(log_path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)
        except OSError as e:
            self.log_fault = e
        pipe, output = os.pipe()
        self.pipe = os.fdopen(pipe, "rb", buffering=0)
        try:
            self.process = start(command, environ, output, stdin)
        except OSError:
            self.pipe.close()
            if self.log:
                self.log.close()
            raise
        finally:
            os.close(output)
        os.set_blocking(self.pipe.fileno(), False)
        self.partial = b""
        self._in_tensorflow_log = False  # the previous line was one of TensorFlow's log
        self.held: list[bytes] = []
        self.held_since = 0.0
        self._last_line = b""
        self.is_out_of_memory = False  # the system has killed a process, because memory was exhausted
        self.open = True
        self.over = False

    def read(self, last: bool = False) -> list[bytes]:
        """Returns complete lines written since the last call, at most one chunk, and records the end of the output.

        Args:
            last: Whether to return a line without a line end, too, because the task has ended.
        """
        try:
            # One chunk: a task that never stops writing must leave time for signals.
            chunk = os.read(self.pipe.fileno(), _CHUNK)
        except BlockingIOError:
            if not last:
                return []
            chunk = b""
        except OSError:
            chunk = b""
            self.open = False
        else:
            self.open = chunk != b""
        self._write_log(chunk)
        *lines, self.partial = (self.partial + chunk).split(b"\n")
        # A long line is cut, so that a task that never ends its line does not fill the launcher's memory.
        if last or not self.open or len(self.partial) > _LONGEST_LINE:
            lines.append(self.partial)
            self.partial = b""
        shown = []
        for line in filter(bytes.strip, map(to_plain, lines)):
            self._in_tensorflow_log = is_tensorflow_log(line, self._in_tensorflow_log)
            if not self._in_tensorflow_log:
                shown.append(line)
        self._last_line = shown[-1] if shown else self._last_line
        return shown

    def take_prompt(self) -> bytes:
        """Returns the line that the task has begun, if any; its remainder will be a line of its own."""
        prompt = to_plain(self.partial)
        if prompt:
            self.partial = b""
        return prompt

    def _write_log(self, chunk: bytes) -> None:
        """Writes to the log until the first error: a full disk must not end a training."""
        if self.log is None:
            return
        try:
            while chunk:
                chunk = chunk[self.log.write(chunk) :]
        except OSError as e:
            self.log_fault = e
            try:
                self.log.close()
            except OSError:  # the disk's error again, on a network file system
                pass
            self.log = None

    @property
    def loss(self) -> progress.Loss | None:
        """The loss of another task that this task has reported, because of which it fails; None without a report."""
        code = self.process.returncode
        # A task that was killed, or has succeeded, did not end because of its report.
        if code is not None and code <= 0:
            return None
        return progress.read(self._folder, self.spec.name).lost

    def failure(self) -> Failure:
        """Returns the failure of the task, which has ended."""
        code, last_line = self.process.returncode, truncate(self._last_line.decode(errors="replace").strip())
        return read_failure(self._folder, self.spec, code, last_line, self.log_path, self.is_out_of_memory)

    def failures_by_cause(self) -> tuple[bool, bool, bool, float]:
        """Returns a key that sorts ended tasks, the likely cause of the other failures first.

        Killed tasks come first, then errors of the configuration, then tasks by the time of their traceback. Tasks that report another
        task's end come last.
        """
        code = self.process.returncode
        return (code >= 0, self.loss is not None, code != process_end.FAULTY_CONFIG, self.held_since or float("inf"))

    def signal(self, number: int) -> bool:
        """Sends a signal to the task and all processes that it has started; returns whether any of them existed."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Kills the remaining processes of the task and closes its files."""
        if not self.over:  # afterwards another process may have its id
            self.signal(signal.SIGKILL)
        self.process.wait()
        self.pipe.close()
        if self.log:
            self.log.close()


def to_plain(line: bytes) -> bytes:
    """Returns a line as a terminal finally shows it, without escape codes; empty for a progress bar that is not complete."""
    # Each part overwrites the one before.
    line = next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
    # Keras' progress bar; without a terminal Keras prints a new line for each step.
    done, is_bar, _ = line.removeprefix(_BOLD).partition(_PLAIN)
    step, _, steps = done.strip().partition(b"/")
    if line.startswith(_BOLD) and is_bar and step.isdigit() and step != steps:
        return b""
    first, *others = line.split(b"\x1b")
    return b"".join([first, *map(_after_code, others)]).translate(None, _CONTROLS)


def _after_code(text: bytes) -> bytes:
    """Returns a text that follows the escape character, without the code at its start: a colour, a movement of the cursor, or a title."""
    if text.startswith(b"["):
        return text[1:].lstrip(_PARAMETERS)[1:]
    if text.startswith(b"]"):  # its end is the bell, or a code of its own
        return text.partition(b"\x07")[2]
    return text.lstrip(_PARAMETERS)[1:]


def set_logs_aside(folder: pathlib.Path, tasks: Sequence[TaskSpec] | None = None) -> None:
    """Moves the logs of an earlier run to the folder `before` in their folder.

    Only those of `tasks`, unless it is None: logs of other tasks may belong to other hosts.
    """
    for log in list(folder.glob("*")):
        is_own = tasks is None or log.stem in [task.name for task in tasks]
        if is_own and log.suffix in _LOGS:
            (folder / "before").mkdir(exist_ok=True)
            log.replace(folder / "before" / log.name)


@contextlib.contextmanager
def handling_signals(on_signal: Callable[[int], object]) -> Iterator[None]:
    """Calls a function with the number of each SIGINT, SIGTERM and SIGHUP in the block. Ignored signals stay ignored, as under nohup.

    In another thread than the main one it does nothing: Python has no handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: on_signal(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
