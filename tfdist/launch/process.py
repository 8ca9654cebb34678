"""The process of one task: its environment, its lines of output, and the cause of its failure. No TensorFlow here."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

import psutil

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.runtime import progress, stacks, tensorflow_log
from tfdist.runtime.files import open_own
from tfdist.runtime.tensorflow_log import CXX_LINE, is_tensorflow_log

_TAIL_LINES = 20
_LOGS = (".log", stacks.SUFFIX)
_LONGEST_LINE = 1 << 16
_CHUNK = 1 << 16  # bytes per read: the size of a pipe
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]*(Error|Exception|Interrupt|BdbQuit)\b")
# The end of a debugger, or of `input()`, that a person did not answer.
_NO_ANSWER = re.compile(rb"(?=\S).*\b(BdbQuit\b|EOFError: EOF when reading a line)")
# First lines of messages whose cause is further down, and lines between that do not contain the cause.
_HEADING = re.compile(rb":$|Exception encountered when calling ")
_DETAIL = re.compile(
    rb"\s|Arguments received by |Detected at node |<stack traces unavailable>|Node: |\d+ root error|.*:$"
)
_REASON_LENGTH = 200
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


class Process(Protocol):
    """The part of `subprocess.Popen` that the launcher uses."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def returncode(self) -> Any:
        """The exit code, or minus the number of the signal that ended the process; None while it runs."""

    def poll(self) -> int | None:
        """Returns `returncode`, after a look at the process."""

    def wait(self) -> int | None:
        """Waits for the end of the process, and returns `returncode`."""


def spawn(command: Sequence[str], environ: Mapping[str, str], output: int, stdin: int = subprocess.DEVNULL) -> Process:
    """Starts a command as the leader of a new session.

    Args:
        command: The command.
        environ: Its environment.
        output: The descriptor for its standard output and error.
        stdin: The descriptor of its standard input.

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
        append: bool,
        start: Callable[[Sequence[str], Mapping[str, str], int, int], Process] = spawn,
        stdin: int = subprocess.DEVNULL,
    ):
        self.spec = spec
        self._folder = environ.get(progress.FOLDER)
        self.log_path = log_path
        self.log: IO[bytes] | None = None
        self.log_fault: OSError | None = None
        try:
            how = os.O_WRONLY | (os.O_APPEND if append else os.O_TRUNC)
            self.log = os.fdopen(open_own(log_path, how), "ab", buffering=0)
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
            chunk, self.open = b"", False
        else:
            self.open = chunk != b""
        self._write_log(chunk)
        *lines, self.partial = (self.partial + chunk).split(b"\n")
        if last or not self.open or len(self.partial) > _LONGEST_LINE:
            lines, self.partial = [*lines, self.partial], b""
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
        if prompt := to_plain(self.partial):
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
            with contextlib.suppress(OSError):
                self.log.close()
            self.log, self.log_fault = None, e

    @property
    def loss(self) -> progress.Loss | None:
        """The loss of another task that this task has reported, because of which it fails; None without a report."""
        code = self.process.returncode
        may_be_cause = code is None or code > 0
        return progress.read_loss(self._folder, self.spec.name) if self._folder and may_be_cause else None

    def failures_by_cause(self) -> tuple[bool, bool, float]:
        """Returns a key that sorts ended tasks, the likely cause of the other failures first.

        Killed tasks come first, then tasks by the time of their traceback. Tasks that report another task's end come last.
        """
        return (self.process.returncode >= 0, self.loss is not None, self.held_since or float("inf"))

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


def task_environ(
    environ: Mapping[str, str], cluster: ClusterSpec, task: TaskSpec, folder: str, log_dir: str | os.PathLike[str]
) -> dict[str, str]:
    """Returns the environment of a task.

    Args:
        environ: The environment that the task inherits.
        cluster: The cluster.
        task: The task.
        folder: The folder in which the task writes its progress.
        log_dir: The folder of the tasks' logs, in which it writes its stacks and collectives.
    """
    variables = {tensorflow_log.LEVEL: tensorflow_log.ERRORS_ONLY, **environ}
    variables |= {"TF_CONFIG": cluster.to_tf_config(task), "PYTHONUNBUFFERED": "1", progress.FOLDER: folder}
    variables[stacks.FOLDER] = os.path.abspath(log_dir)
    variables[progress.LAUNCHED] = str(psutil.Process().create_time())
    # The cluster's tasks reserve all memory of the GPUs, so the evaluator gets none.
    return variables if task.type != "evaluator" else {**variables, "CUDA_VISIBLE_DEVICES": ""}


def lacks_answer(reason: str) -> bool:
    """Returns whether a task failed because a debugger, or `input()`, got no answer, or its user ended the debugger."""
    return bool(_NO_ANSWER.match(reason.encode()))


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
        if not self.exit_code:
            return "exit code 0 before the training has finished" + (f" ({self.reason})" if self.reason else "")
        return f"exit code {self.exit_code}" + (f": {self.reason}" if self.reason else "")

    @property
    def status(self) -> int:
        """The exit code that a shell would show."""
        # Exit code 0 before the end of the training is a failure, too.
        return self.exit_code if self.exit_code > 0 else 128 - self.exit_code if self.exit_code else 1

    @property
    def is_of_another(self) -> bool:
        """Whether the task ended because it had lost another task."""
        return self.loss is not None

    def remedy(self, saved: int | None) -> str:
        """Returns how to continue after a process was killed, lost or left its `fit`, or an empty text; `saved` is the last backup's step."""
        if not self.exit_code and self.reason:
            return (
                ". os._exit, or code outside of Python, has ended it. To end a training early, set model.stop_training = True in a "
                "callback; for an error, raise one"
            )
        if self.exit_code >= 0 and (self.loss is None or self.loss.remedy):
            return ""
        again = "No backup was made" if saved == 0 else "Run the command again to continue from "
        again += "" if saved == 0 else "the chief's last backup, if there is one" if saved is None else f"step {saved}"
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
    if unanswered := [line for line in lines if _NO_ANSWER.match(line)]:
        return _shorten(unanswered[-1])
    line_numbers = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
    if not line_numbers:
        return _shorten(next((line for line in reversed(lines) if _COMPLAINT.match(line)), b""))
    first, *others = lines[line_numbers[-1] :]
    if not _HEADING.search(first.strip()):
        return _shorten(first)
    content = next((line for line in others if not _DETAIL.match(line)), b"")
    kind = first.partition(b": ")[0]
    return _shorten(kind + b": " + content.strip() if content else first)


def _shorten(line: bytes) -> str:
    text = line.decode(errors="replace").strip().rstrip(".:;, ")
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3] + "..."


def signal_name(number: int) -> str:
    """Returns `SIGKILL` for 9, and a text for numbers without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def to_plain(line: bytes) -> bytes:
    """Returns a line as a terminal finally shows it, without escape codes; empty for a progress bar that is not complete."""
    line = next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")
    bar = _PROGRESS_BAR.match(line)
    return b"" if bar and bar[1] != bar[2] else _ESCAPES.sub(b"", line)


def warning_text(line: bytes) -> bytes | None:
    """Returns the part of a warning that is equal in repetitions, without the time; None for other lines.

    Warnings are Python's, those that `logging` and absl print in their default forms, and those of TensorFlow's C++ log.
    """
    if match := CXX_LINE.match(line):
        if (match["absl"] or match["tsl"]) != b"W":
            return None
        return match["place"] + re.sub(rb"\d+", b"0", match["text"])  # addresses, sizes
    if match := _LOGGED_WARNING.match(line):
        return match["text"] or line
    return line if _PYTHON_WARNING.match(line) else None


def is_source_of(warning: bytes, line: bytes) -> bool:
    """Returns whether a line is the line of code that Python prints below a warning."""
    match = _PYTHON_WARNING.match(warning)
    if not match or not line.startswith(b"  "):
        return False
    code = linecache.getline(match["file"].decode(errors="replace"), int(match["line"])).strip()
    return bool(code) and code.encode() == line.strip()


def set_logs_aside(folder: pathlib.Path, tasks: Sequence[TaskSpec] | None = None) -> None:
    """Moves the logs of an earlier run to the folder `before` in their folder.

    Args:
        folder: The folder.
        tasks: The tasks whose logs move; None means all. Logs of other tasks may belong to other hosts.
    """
    names = None if tasks is None else {task.name for task in tasks}
    for log in [*folder.glob("*")]:
        if log.suffix not in _LOGS or (names is not None and log.stem not in names):
            continue
        (folder / "before").mkdir(exist_ok=True)
        log.replace(folder / "before" / log.name)


@contextlib.contextmanager
def handling_signals(on_signal: Callable[[int], object]) -> Iterator[None]:
    """Calls a function with the number of each SIGINT, SIGTERM and SIGHUP in the block. Ignored signals stay ignored, as under nohup."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: on_signal(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
