"""The process of one task: its environment, its lines of output, and the cause of its failure. No TensorFlow here."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import os
import pathlib
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeAlias

from tfdist.cluster import TaskSpec
from tfdist.errors import ConfigError, truncate
from tfdist.runtime.end import process_end
from tfdist.runtime.files import open_own
from tfdist.runtime.report import progress, stacks
from tfdist.runtime.tensorflow_log import CXX_LINE, is_tensorflow_log

_TAIL_LINES = 20
_LOGS = (".log", stacks.SUFFIX)
_LONGEST_LINE = 1 << 16
_CHUNK = 1 << 16  # bytes per read: the size of a pipe
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]*(Error|Exception|Interrupt|BdbQuit)\b")
# The end of a debugger, or of `input()`, that a person did not answer.
_NO_ANSWER = re.compile(rb"(?=\S).*\b(BdbQuit\b|EOFError: EOF when reading a line)")
# How the last line of a script's traceback begins.
_CONFIG_ERROR = f"{ConfigError.__module__}.{ConfigError.__qualname__}"
# First lines of messages whose cause is further down, and lines between that do not contain the cause.
_HEADING = re.compile(rb":$|Exception encountered when calling ")
_DETAIL = re.compile(
    rb"\s|Arguments received by |Detected at node |<stack traces unavailable>|Node: |\d+ root error|.*:$"
)
_END_SECONDS = 1.0  # limit of the wait for the end of the process that has waited for a task
_STACKS = stacks.HEADING.encode()
# The lines that faulthandler writes.
_STACK_LINE = re.compile(rb"(?:Current thread|Thread) 0x[0-9a-f]+|  File \"|  \.\.\.$|  <")
_COMPLAINT = re.compile(rb"tfdist: |.*\b(error|fatal|fault|aborted|killed|core dumped)\b", re.IGNORECASE)
_PYTHON_WARNING = re.compile(rb"(?P<file>.+?):(?P<line>\d+): (?:\w+\.)*\w*Warning: ")
_LOGGED_WARNING = re.compile(rb"WARNING:[\w.]+:|W\d{4} [\d:.]+ +\d+ \S+\.py:\d+\] (?P<text>.*)")
# Colours, movements of the cursor, titles, and control characters except the tabulator.
_ESCAPES = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]|[\x00-\x08\x0a-\x1f\x7f]"
)
# Keras' progress bar; without a terminal Keras prints a new line for each step.
_PROGRESS_BAR = re.compile(rb"\x1b\[1m\s*(\d+)/(\d+|Unknown)\x1b\[0m ")


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
        self._folder = environ.get(progress.FOLDER)
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
        self._in_stacks = False  # the previous line was one of the stacks of all threads, which only the log shows
        self.held: list[bytes] = []
        self.held_since = 0.0
        self.tail: list[bytes] = []
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
            self._in_stacks = line.startswith(_STACKS) or (self._in_stacks and bool(_STACK_LINE.match(line)))
            if not self._in_tensorflow_log and not self._in_stacks:
                shown.append(line)
        self.tail = (self.tail + shown)[-_TAIL_LINES:]
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
        if not self._folder or (code is not None and code <= 0):
            return None
        return progress.read(self._folder, self.spec.name).lost

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


def last_backup(saved: int | None) -> str:
    """Returns the name of the step of the last backup; None if only another host's launcher knows it."""
    return "the chief's last backup, if there is one" if saved is None else f"step {saved}"


def lacks_answer(reason: str) -> bool:
    """Returns whether a task failed because a debugger, or `input()`, got no answer, or its user ended the debugger."""
    return bool(_NO_ANSWER.match(reason.encode()))


def is_config_error(exit_code: int, reason: str) -> bool:
    """Returns whether a task has found an error of the configuration. `reason` is the last line of its traceback."""
    return exit_code == process_end.FAULTY_CONFIG or (exit_code == 1 and reason.startswith(_CONFIG_ERROR))


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of a task.

    Attributes:
        task: The task that failed.
        exit_code: The task's exit code, or minus the number of the signal that ended it.
        reason: The last line of the task's traceback or another error message, or an empty text; for exit code 0, the step.
        loss: The task's report that it ended because it had lost another task, or None.
    """

    task: TaskSpec
    exit_code: int
    reason: str
    loss: progress.Loss | None = None

    @property
    def is_config_error(self) -> bool:
        """Whether the task has found an error of the configuration."""
        return is_config_error(self.exit_code, self.reason)

    @property
    def lost(self) -> str:
        """The task that was lost: the one that failed, or the one that it had lost."""
        return self.loss.task if self.loss else str(self.task)

    @property
    def cause(self) -> str:
        """How the task ended: `killed by SIGKILL`, or `exit code 1: ValueError: ...`."""
        if self.loss:
            return str(self.loss)
        if self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        if self.exit_code:
            error = f": {self.reason}" if self.reason else ""
            return f"exit code {self.exit_code}" + error
        reached = f" ({self.reason})" if self.reason else ""
        return "exit code 0 before the training has finished" + reached

    @property
    def status(self) -> int:
        """The exit code that a shell would show."""
        if self.exit_code < 0:
            return 128 - self.exit_code
        if self.is_config_error:
            return process_end.FAULTY_CONFIG
        return self.exit_code or 1  # exit code 0 before the end of the training is a failure, too

    def remedy(self, saved: int | None) -> str:
        """Returns how to continue after a process was killed, lost or left its `fit`, or an empty text; `saved` is the last backup's step."""
        if not self.exit_code and self.reason:
            return (
                ". os._exit, or code outside of Python, has ended it. To end a training early, set model.stop_training = True in a "
                "callback; for an error, raise one"
            )
        if self.exit_code >= 0 and (self.loss is None or self.loss.remedy):
            return ""
        again = f"Run the command again to continue from {last_backup(saved)}"
        if saved == 0:
            again = "No backup was made"
        return f". {again}; max_restarts starts the tasks again by itself, from the last backup"

    def __str__(self) -> str:
        if self.loss:
            return self.cause
        if self.exit_code < 0:
            return f"{self.task} was {self.cause}"
        return f"{self.task} failed with {self.cause}"


def last_error_line(lines: Sequence[bytes]) -> str:
    """Returns the message of the last exception in one line; without an exception, the last error message, or an empty text.

    A message of several lines is represented by its first line, or by the next one with content if the first is only a heading.
    Keras raises another exception if a debugger in a layer gets no answer; then the message is that of the debugger.
    """
    unanswered = list(filter(_NO_ANSWER.match, lines))
    if unanswered:
        return _shorten(unanswered[-1])
    line_numbers = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
    if not line_numbers:
        return _shorten(next(filter(_COMPLAINT.match, reversed(lines)), b""))
    first, *others = lines[line_numbers[-1] :]
    if _HEADING.search(first.strip()):
        content = next((line for line in others if not _DETAIL.match(line)), b"")
        if content:
            first = first.partition(b": ")[0] + b": " + content.strip()
    return _shorten(first)


def _shorten(line: bytes) -> str:
    return truncate(line.decode(errors="replace").strip().rstrip(".:;, "))


def signal_name(number: int) -> str:
    """Returns `SIGKILL` for 9, and a text for numbers without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def to_plain(line: bytes) -> bytes:
    """Returns a line as a terminal finally shows it, without escape codes; empty for a progress bar that is not complete."""
    # Each part overwrites the one before.
    line = next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
    bar = _PROGRESS_BAR.match(line)
    if bar and bar[1] != bar[2]:
        return b""
    return _ESCAPES.sub(b"", line)


def warning_text(line: bytes) -> bytes | None:
    """Returns the part of a warning that is equal in repetitions, without the time; None for other lines.

    Warnings are Python's, those that `logging` and absl print in their default forms, and those of TensorFlow's C++ log.
    """
    cxx = CXX_LINE.match(line)
    if cxx:
        if b"W" not in (cxx["absl"], cxx["tsl"]):
            return None
        return cxx["place"] + re.sub(rb"\d+", b"0", cxx["text"])  # addresses, sizes
    logged = _LOGGED_WARNING.match(line)
    if logged:
        return logged["text"] or line
    if _PYTHON_WARNING.match(line):
        return line
    return None


def is_source_of(warning: bytes, line: bytes) -> bool:
    """Returns whether a line is the line of code that Python prints below a warning."""
    match = _PYTHON_WARNING.match(warning)
    if not match or not line.startswith(b"  "):
        return False
    code = linecache.getline(match["file"].decode(errors="replace"), int(match["line"])).strip()
    return bool(code) and code.encode() == line.strip()


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
