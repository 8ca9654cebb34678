"""The evaluator's process, beside the tasks that train: its failure never ends the training tasks. No TensorFlow here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from tfdist.cluster import TaskSpec
from tfdist.launch.guardian import Guardian
from tfdist.launch.output import LauncherOutput
from tfdist.launch.process import Failure, TaskProcess, last_error_line
from tfdist.launch.restart_policy import RestartPolicy, why_final
from tfdist.runtime import progress

SPEC = TaskSpec("evaluator", 0)
_RESTARTS = 3
_SILENT_SECONDS = 300.0  # seconds without a batch after which the evaluator counts as hanging
_STOP_SECONDS = 2.0  # seconds to stop; few, because the evaluator has nothing to save


class EvaluatorProcess:
    """Supervisor of the evaluator: starts its process, and restarts it if it fails.

    Args:
        start: Starts the process; takes the task, and whether to append to the log.
        output: Prints the evaluator's lines.
        guardian: Kills the evaluator if this process is killed.
        folder: The folder in which tasks write their progress.

    Attributes:
        is_over: Whether the evaluator has ended for good.
    """

    def __init__(
        self, start: Callable[[TaskSpec, bool], TaskProcess], output: LauncherOutput, guardian: Guardian, folder: str
    ):
        self._start = start
        self._output = output
        self._guardian = guardian
        self._folder = folder
        self._policy = RestartPolicy(_RESTARTS)
        self._due = 0.0
        self._started = 0.0
        self._starts = 0
        self._task: TaskProcess | None = None
        self.is_over = False

    def __enter__(self) -> EvaluatorProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def look(self) -> None:
        """Prints the evaluator's lines, starts it when a start is due, and handles its end."""
        task = self._task
        if task is None:
            if not self.is_over and time.monotonic() >= self._due:
                self._task, self._started = self._start(SPEC, self._starts > 0), time.time()
                self._starts += 1
            return
        self._output.forward(task)
        self._output.release_expired(task)
        if task.process.poll() is not None:
            self._close(task)
            self._ended(task)

    def finish(self, is_stopped: Callable[[], bool], between: Callable[[], object]) -> None:
        """Waits until the evaluator has evaluated the last backups of a finished training run, or hangs.

        Args:
            is_stopped: Returns whether to stop waiting.
            between: Function to call while it waits; must call `look`.
        """
        announced, begun = False, time.time()
        while not self.is_over and not is_stopped():
            if not announced and self._task:
                self._output.say(
                    f"the training has finished; waiting for {SPEC}, which evaluates the remaining backups"
                )
                announced = True
            between()
            alive_at = max(begun, self._started, progress.touched(self._folder, SPEC.name))
            if self._task and time.time() - alive_at > _SILENT_SECONDS:
                self._output.say(f"{SPEC} has evaluated no batch for {_SILENT_SECONDS:.0f} s; ending it")
                break
            time.sleep(0.05)

    @property
    def running(self) -> list[TaskSpec]:
        """The evaluator, if it runs."""
        return [SPEC] * (self._task is not None)

    @property
    def waiting(self) -> list[TaskSpec]:
        """The evaluator, if it will be started."""
        return [SPEC] * (self._task is None and not self.is_over)

    def _stop(self) -> None:
        task, self.is_over = self._task, True
        if task is None:
            return
        task.signal(signal.SIGTERM)
        until = time.monotonic() + _STOP_SECONDS
        while task.process.poll() is None and time.monotonic() < until:
            self._output.forward(task)
            time.sleep(0.02)
        self._close(task)
        self._output.release(task)

    def _close(self, task: TaskProcess) -> None:
        task.signal(signal.SIGKILL)  # to the evaluator and all processes that it has started
        task.process.wait()
        task.over = True
        self._output.drain(task)
        self._guardian.unwatch(task.process.pid)
        task.close()
        self._task = None

    def _ended(self, task: TaskProcess) -> None:
        code = task.process.returncode
        failure = Failure(SPEC, code, last_error_line(task.held or task.tail))
        self._output.release(task)
        if code == 0:
            self.is_over = True
            return
        steps = progress.read(self._folder, SPEC.name)
        if not (why := why_final(code, False) or self._policy.failed(steps.done if steps else None)):
            self._due = time.monotonic() + self._policy.delay
            self._output.say(f"{SPEC} lost ({failure.cause}); restarting it while the training continues")
            return
        self.is_over = True
        self._output.say(f"{failure}; {why}; the training continues without it. Full output: {task.log_path}")
