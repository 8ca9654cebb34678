"""Starts, watches and ends the tasks of a cluster on this machine. No TensorFlow here.

    python -m tfdist.launch --workers=2 -- python script.py --its --flags

Every task gets a TF_CONFIG of its own. Its output is shown behind its name and kept in `LOG_DIR/<task>.log`. The first
task that fails ends all others and is named with the reason. No process is left over, whatever is killed: each task
leads a process group, and a guardian process kills the groups when the launcher is gone.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

from tfdist.cluster import ClusterSpec, TaskSpec, local_cluster
from tfdist.errors import ConfigError

# A traceback is held back for this long: its task may be about to end of it, and then it is shown with that.
_HOLD_SECONDS = 3.0
_TAIL_LINES = 20
_LONGEST_LINE = 1 << 16
_TRACEBACK = b"Traceback (most recent call last):"
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b")
# TensorFlow's C++ log below errors, and its errors about GPUs that are not there: in the task's log, not on the screen.
_CHATTER = re.compile(
    rb"[IW]\d{4} [\d:.]+ +\d+ |\d{4}-\d\d-\d\d [\d:.]+: [IW] |E\d{4} .*cuInit|WARNING: All log messages before absl"
    rb"|To enable the following instructions: |/job:\w+/replica:\d+/task:\d+$"
)

# Reads process groups to watch from a pipe. At its end, which comes when the launcher has died in whatever way, kills
# what is left of them. In a session of its own, to survive what is sent to the launcher's group.
_GUARDIAN = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first task that failed.

    Attributes:
        task: Which.
        exit_code: Its exit code, or minus the number of the signal that ended it.
        reason: Its last words: the last line of its traceback, or of its output.
    """

    task: TaskSpec
    exit_code: int
    reason: str

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"{self.task} was killed by {_signal_name(-self.exit_code)}"
        return f"{self.task} failed with exit code {self.exit_code}" + (f": {self.reason}" if self.reason else "")


class _Task:
    """A running task: its process, its pipe and what of its output is held back."""

    def __init__(self, spec: TaskSpec, command: Sequence[str], environ: Mapping[str, str], log_path: pathlib.Path):
        self.spec = spec
        self.log_path = log_path
        self.log: IO[bytes] = log_path.open("wb")
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
            self.log.write(chunk)
            self.log.flush()
            *lines, self.partial = re.split(rb"[\r\n]+", self.partial + chunk)
            if len(self.partial) > _LONGEST_LINE:
                lines, self.partial = [*lines, self.partial], b""
        lines = [line for line in lines if line.strip() and not _CHATTER.match(line)]
        self.tail = (self.tail + lines)[-_TAIL_LINES:]
        return lines

    def blame(self) -> tuple[bool, float]:
        """Sorts ended tasks: killed ones first, then by the time of their traceback."""
        return (self.process.returncode >= 0, self.held_since or float("inf"))

    def signal(self, number: int) -> bool:
        """Sends a signal to the task and all that it has started; returns whether any of it was there."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True


class Launcher:
    """Runs one command as every task of a cluster.

    Args:
        command: The command and its arguments, the same for all tasks.
        cluster: The tasks and their addresses.
        log_dir: Where each task's output is kept, as `<task>.log`.
        environ: The environment that tasks inherit. None means this process's.
        grace_seconds: How long tasks have to end after SIGTERM before SIGKILL: TensorFlow may be waiting for a peer and
            not heed a signal.
        output: Where tasks' lines go. None means this process's standard output.

    Attributes:
        failure: The first failure of the last `run`, or None.
    """

    def __init__(
        self,
        command: Sequence[str],
        cluster: ClusterSpec,
        log_dir: str | os.PathLike[str],
        environ: Mapping[str, str] | None = None,
        grace_seconds: float = 25.0,
        output: IO[bytes] | None = None,
    ):
        self._command = list(command)
        self._cluster = cluster
        self._log_dir = pathlib.Path(log_dir)
        self._environ = dict(os.environ if environ is None else environ)
        self._grace_seconds = grace_seconds
        self._output = output or sys.stdout.buffer
        self._tasks: list[_Task] = []
        self._signals: list[int] = []
        self._kill_at = float("inf")
        self.failure: Failure | None = None

    def run(self) -> int:
        """Starts all tasks and waits until all have ended.

        Returns:
            0 if all succeeded; else the first failure's exit code, or 128 + the number of the signal that ended it or
            the launcher. With parameter servers the job ends when the chief does: servers never end by themselves.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        # What is ignored stays so, as under nohup.
        heeded = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        caught = {n: signal.signal(n, self._on_signal) for n in heeded}
        try:
            with subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _GUARDIAN],
                bufsize=0,  # so that nothing is left to write, and to fail, should the guardian have been killed
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ) as self._guardian:
                try:
                    self._start()
                    self._watch()
                finally:
                    for task in self._tasks:
                        if not task.over:  # else its number may be another's by now
                            task.signal(signal.SIGKILL)
                        task.process.wait()
                        task.log.close()
                        task.pipe.close()
        finally:
            for number, handler in caught.items():
                signal.signal(number, handler)
        if self._signals:
            return 128 + self._signals[0]
        if self.failure is None:
            return 0
        return self.failure.exit_code if self.failure.exit_code > 0 else 128 - self.failure.exit_code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _start(self) -> None:
        for spec in self._cluster.tasks():
            environ = {**self._environ, "TF_CONFIG": self._cluster.to_tf_config(spec), "PYTHONUNBUFFERED": "1"}
            environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's C++ log: errors only
            task = _Task(spec, self._command, environ, self._log_dir / f"{spec.name}.log")
            self._tasks.append(task)
            self._tell_guardian("+", task)

    def _tell_guardian(self, sign: str, task: _Task) -> None:
        pipe = self._guardian.stdin
        try:
            if pipe is not None:
                pipe.write(f"{sign}{task.process.pid}\n".encode())
        except BrokenPipeError:  # somebody killed it; this process still ends its tasks itself
            pass

    def _watch(self) -> None:
        handled = 0
        running = list(self._tasks)
        with selectors.DefaultSelector() as selector:
            for task in self._tasks:
                selector.register(task.pipe, selectors.EVENT_READ, task)
            while running:
                for key, _ in selector.select(timeout=0.05):
                    self._pump(key.data, selector)
                for task in running:
                    if task.held and time.monotonic() - task.held_since > _HOLD_SECONDS:
                        self._release(task)
                # Of several at once, the one that was killed or complained first is the cause.
                for task in sorted(filter(self._is_over, running), key=_Task.blame):
                    running.remove(task)
                    # What it started and left behind would hold its pipe open, too.
                    task.signal(signal.SIGKILL)
                    task.over = True
                    self._drain(task, selector)
                    self._tell_guardian("-", task)
                    self._ended(task, running)
                if len(self._signals) > handled:
                    self._end(running, self._signals[0], now=handled > 0)
                    handled = len(self._signals)
                if time.monotonic() > self._kill_at:
                    for task in running:
                        task.signal(signal.SIGKILL)

    def _is_over(self, task: _Task) -> bool:
        # A shell dies of a signal at once; what it runs has the whole grace.
        stopping = self._kill_at < float("inf") and time.monotonic() < self._kill_at
        return task.process.poll() is not None and not (stopping and task.signal(0))

    def _pump(self, task: _Task, selector: selectors.BaseSelector) -> None:
        for line in task.read():
            if task.held or line.startswith(_TRACEBACK):
                task.held_since = task.held_since if task.held else time.monotonic()
                task.held.append(line)
            else:
                self._print(task, line)
        if not task.open and task.pipe in selector.get_map():
            selector.unregister(task.pipe)

    def _drain(self, task: _Task, selector: selectors.BaseSelector) -> None:
        deadline = time.monotonic() + 1
        while task.open and time.monotonic() < deadline:
            self._pump(task, selector)

    def _release(self, task: _Task) -> None:
        for line in task.held:
            self._print(task, line)
        task.held = []

    def _print(self, task: _Task, line: bytes) -> None:
        self._write(f"[{task.spec}] ".encode() + line)

    def _write(self, line: bytes) -> None:
        try:
            self._output.write(line + b"\n")
            self._output.flush()
        except (OSError, ValueError):
            # Nobody reads any more (`| head`), or the disk is full; the logs still have everything.
            self._output = open(os.devnull, "wb")  # noqa: SIM115 (for the rest of the run)

    def _ended(self, task: _Task, running: list[_Task]) -> None:
        code = task.process.returncode
        ending = self._kill_at < float("inf")
        if not ending and code == 0:
            self._release(task)
            if task.spec == self._cluster.chief and self._cluster.jobs.get("ps"):
                self._end(running, signal.SIGTERM)
        elif not ending and code < 0 and self._can_spare(task, running):
            self._release(task)
            self._write(f"tfdist: {task.spec} was killed by {_signal_name(-code)}; the other workers go on".encode())
        elif not ending:
            self.failure = Failure(task.spec, code, _last_words(task.held or task.tail))
            self._release(task)
            self._write(f"tfdist: {self.failure}; ending all tasks. Full output: {task.log_path}".encode())
            self._end(running, signal.SIGTERM)
        # The traceback of a task that fails because another one failed first stays in its log.

    def _can_spare(self, task: _Task, running: list[_Task]) -> bool:
        """Whether the job goes on without a task: parameter servers keep what a worker has learnt."""
        others = any(other.spec.type == "worker" for other in running)
        return task.spec.type == "worker" and bool(self._cluster.jobs.get("ps")) and others

    def _end(self, running: list[_Task], number: int, now: bool = False) -> None:
        """Asks the tasks still running to end; kills them after the grace."""
        # A failed cluster has nothing to save: its other tasks are stuck in a collective, and deaf.
        grace = 0.0 if now else min(self._grace_seconds, 2.0) if self.failure else self._grace_seconds
        self._kill_at = min(self._kill_at, time.monotonic() + grace)
        for task in running:
            task.signal(number)


def _last_words(lines: Sequence[bytes]) -> str:
    """Returns the line that names the exception (TensorFlow's go on after it), or the last line."""
    named = [line for line in lines if _EXCEPTION.match(line)]
    return (named or lines or [b""])[-1].decode(errors="replace").strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(argv: Sequence[str]) -> int:
    """Runs `python -m tfdist.launch`; returns the exit code: of `Launcher.run`, or 2 for a faulty command line."""
    from absl import flags

    values = flags.FlagValues()
    flags.DEFINE_integer("workers", 1, "Number of training tasks.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "ps", 0, "Number of parameter servers; a chief comes on top.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_string("log_dir", "logs", "Folder for each task's full output.", flag_values=values)
    flags.DEFINE_float(
        "grace_seconds", 25.0, "Time to end after a signal before SIGKILL.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_bool("help", False, "Show this help.", short_name="h", flag_values=values)
    arguments = list(argv[1:])
    split = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[split + 1 :]
    try:
        rest = values([argv[0], *arguments[:split]])[1:]
        if values.help:
            print(f"{__doc__}\n{values.get_help()}")
            return 0
        if rest or not command:
            raise ConfigError(
                "Usage: python -m tfdist.launch [--workers=N] [--ps=N] [--log_dir=DIR] [--grace_seconds=S] -- COMMAND. "
                f"Received: {' '.join(arguments) or 'nothing'}"
            )
        launcher = Launcher(
            command, local_cluster(values.workers, values.ps), values.log_dir, grace_seconds=values.grace_seconds
        )
        return launcher.run()
    except (ConfigError, flags.Error) as e:
        print(e, file=sys.stderr)
        return 2
    except OSError as e:
        print(f"tfdist: cannot start the tasks: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
