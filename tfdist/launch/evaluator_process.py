"""The evaluator's process, beside the tasks that train: its failure never ends the training tasks. No TensorFlow here."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from tfdist.cluster import TaskSpec
from tfdist.launch.process import TaskProcess
from tfdist.launch.restart_policy import RestartPolicy, why_final
from tfdist.launch.start import Host
from tfdist.runtime.report import progress

SPEC = TaskSpec("evaluator", 0)
_RESTARTS = 3
_SILENT_SECONDS = 300.0  # seconds without a batch after which the evaluator counts as hanging
_STOP_SECONDS = 2.0  # seconds to stop; few, because the evaluator has nothing to save


class EvaluatorProcess:
    """Supervisor of the evaluator: starts its process, and restarts it if it fails.

    Args:
        host: The parts that the evaluator shares with the tasks of all starts.

    Attributes:
        is_over: Whether the evaluator has ended for good, or the job has none.
    """

    def __init__(self, host: Host):
        self._host = host
        self._policy = RestartPolicy(_RESTARTS)
        self._due = 0.0
        self._started = 0.0
        self._task: TaskProcess | None = None
        self.is_over = not host.options.evaluator

    def __enter__(self) -> EvaluatorProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def look(self) -> None:
        """Prints the evaluator's lines, starts it when a start is due, and handles its end."""
        task = self._task
        if task is None:
            if not self.is_over and time.monotonic() >= self._due:
                self._task = self._host.create(self._host.options.cluster, SPEC)
                self._started = time.time()
            return
        self._host.output.forward(task)
        self._host.output.release_expired(task)
        if task.process.poll() is not None:
            self._close(task)
            self._ended(task)

    def finish(self, is_stopped: Callable[[], bool], between: Callable[[], object]) -> None:
        """Waits until the evaluator has evaluated the last backups of a finished training run, or hangs, or `is_stopped`.

        Meanwhile it calls `between`, which must call `look`.
        """
        announced = False
        begun = time.time()
        while not self.is_over and not is_stopped():
            if not announced and self._task:
                self._host.output.say(
                    f"the training has finished; waiting for {SPEC}, which evaluates the remaining backups"
                )
                announced = True
            between()
            # Its record is touched with each batch; before the first one there are its imports.
            alive_at = max(begun, self._started, progress.touched(self._host.folder, SPEC.name))
            if self._task and time.time() - alive_at > _SILENT_SECONDS:
                self._host.output.say(f"{SPEC} has evaluated no batch for {_SILENT_SECONDS:.0f} s; ending it")
                break
            time.sleep(0.05)

    @property
    def running(self) -> list[TaskSpec]:
        """The evaluator, if it runs."""
        return [SPEC] if self._task else []

    @property
    def waiting(self) -> list[TaskSpec]:
        """The evaluator, if it will be started."""
        return [] if self._task or self.is_over else [SPEC]

    def _stop(self) -> None:
        self.is_over = True
        task = self._task
        if task is None:
            return
        task.signal(signal.SIGTERM)
        until = time.monotonic() + _STOP_SECONDS
        while task.process.poll() is None and time.monotonic() < until:
            self._host.output.forward(task)
            time.sleep(0.02)
        self._close(task)
        self._host.output.release(task)

    def _close(self, task: TaskProcess) -> None:
        self._host.close(task)
        self._task = None

    def _ended(self, task: TaskProcess) -> None:
        failure = task.failure()
        self._host.output.release(task)
        if failure.exit_code == 0:
            self.is_over = True
            return
        record = progress.read(self._host.folder, SPEC.name)
        done = record.done if record.begun else None
        why = why_final(failure.kind) or self._policy.failed(done)
        if not why:
            self._due = time.monotonic() + self._policy.delay
            self._host.output.attempt(self._host.folder, progress.forget_end, self._host.folder, SPEC.name)
            self._host.output.say(f"{SPEC} lost ({failure.cause}); restarting it while the training continues")
            return
        self.is_over = True
        self._host.output.say(f"{failure}; {why}; the training continues without it. Full output: {task.log_path}")
