"""The supervisor: starts, watches, restarts and ends the tasks of a cluster that run on this machine. No TensorFlow here."""

from __future__ import annotations

import contextlib
import os
import pathlib
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from tfdist.cluster import ClusterSpec, TaskSpec, local
from tfdist.launch.agreement import Done
from tfdist.launch.chaos import Chaos
from tfdist.launch.evaluator_process import EvaluatorProcess
from tfdist.launch.guardian import Guardian
from tfdist.launch.output import LauncherOutput
from tfdist.launch.process import (
    Failure,
    TaskProcess,
    handling_signals,
    lacks_answer,
    last_error_line,
    set_logs_aside,
    signal_name,
    task_environ,
)
from tfdist.launch.restart_policy import RestartPolicy, why_final
from tfdist.launch.rounds import Rounds, Start
from tfdist.launch.sizes import Sizes
from tfdist.launch.standard_input import StandardInput
from tfdist.launch.warm import WarmSpare
from tfdist.runtime import late_removal, process_end, progress
from tfdist.runtime.temporary import temporary_folder

_ALONE = (
    "no task has created a tfdist.Trainer or strategy: unless the command connects the tasks itself, each ran alone"
)
# Seconds that tasks have after Ctrl-C: they save nothing then, and may wait for each other.
_AFTER_INTERRUPT = 2.0


class Launcher:
    """Supervisor that runs one command as every task of a cluster, and restarts tasks that fail, if restarts are allowed.

    All tasks of a synchronous cluster restart together, because the others cannot continue without the failed task. With
    parameter servers all tasks restart if the chief or a server fails; a worker restarts alone. A task that ends with exit
    code 75 after SIGTERM requests a restart, too; this is not a failure, and uses no restart.

    Args:
        command: The command and its arguments, the same for all tasks.
        cluster: The tasks and their addresses.
        log_dir: The folder of each task's output, `<task>.log`. Logs of an earlier run move to its subfolder `before`.
        environ: The environment that tasks inherit. None means this process's.
        grace_seconds: Seconds from SIGTERM to SIGKILL. TensorFlow may wait for a peer and not react to SIGTERM.
        output: The stream for the tasks' lines. None means this process's standard output.
        max_restarts: Number of restarts after failures; 0 means that the first failure ends the job.
        prefixes: Words before a task's command, by task. They run the command, such as `nsenter`.
        evaluator: Whether to run the command as the task `evaluator:0`, too: outside the cluster, and without GPUs.
        fresh_ports: Whether to choose new ports when all tasks restart. Only for a cluster of this machine whose ports tfdist has chosen.
        must_finish: Whether exit code 0 is a failure of a task that has not called `progress.mark_finished`. During a `fit` it always is.
        here: The tasks to start on this machine; launchers on other machines start and restart the others. None means all.
        sizes: The number of workers of an elastic job, which continues with fewer workers after one was killed, and with more after
            a backup. Only for synchronous workers of this machine. None means always as many as `cluster` has.
        rounds: The starts of an elastic job on several hosts. None means that the hosts do not change.
        chaos: The events that happen to the tasks, as a test of the job. None means none.
        warm: Whether to fork tasks from a process that has imported TensorFlow and Keras, where that is possible (`WarmSpare`).
        stdin: The task that reads this process's standard input. None means that no task reads it.

    Attributes:
        failure: The failure that ended the last `run`, or None.
        lost_at: The time of the last failure, in seconds since the epoch, or None.

    Examples:
        >>> import sys, tempfile
        >>> from tfdist.cluster import local_cluster
        >>> from tfdist.launch import Launcher
        >>> launcher = Launcher([sys.executable, "train.py"], local_cluster(workers=2), tempfile.mkdtemp(), max_restarts=3)
        >>> # sys.exit(launcher.run())
    """

    def __init__(
        self,
        command: Sequence[str],
        cluster: ClusterSpec,
        log_dir: str | os.PathLike[str],
        environ: Mapping[str, str] | None = None,
        grace_seconds: float = 25.0,
        output: IO[bytes] | None = None,
        max_restarts: int = 0,
        prefixes: Mapping[TaskSpec, Sequence[str]] | None = None,
        evaluator: bool = False,
        fresh_ports: bool = False,
        must_finish: bool = False,
        here: Sequence[TaskSpec] | None = None,
        sizes: Sizes | None = None,
        rounds: Rounds | None = None,
        chaos: Chaos | None = None,
        warm: bool = False,
        stdin: TaskSpec | None = None,
    ):
        self._command = list(command)
        self._prefixes = prefixes or {}
        self._cluster = cluster
        self._here = here
        self._specs = cluster.tasks() if here is None else list(here)
        self._log_dir = pathlib.Path(log_dir)
        self._environ = dict(os.environ if environ is None else environ)
        self._sizes, self._rounds = sizes, rounds
        if elastic := sizes or rounds:
            self._environ[progress.REPLICAS] = str(elastic.replicas)
        self._grace_seconds = grace_seconds
        self._output = LauncherOutput(output, log_dir)
        self._tasks: list[TaskProcess] = []
        self._running: list[TaskProcess] = []
        self._has_evaluator, self._fresh_ports, self._must_finish = evaluator, fresh_ports, must_finish
        self._later: list[tuple[float, TaskSpec]] = []  # time of a worker's restart, and the worker
        self._signals: list[int] = []
        self._kill_at = float("inf")
        self._restart = False
        self._preempted = self._is_growing = False
        self._knows_backups = here is None or cluster.chief in here  # only the chief reports them
        self._saved: int | None = 0  # the step of the last backup; None if unknown
        self._last_preemption_step = self._last_break_step = -1
        self._why = ""  # the reason for the next start, for other hosts' launchers
        self._code: int | None = None  # the job's exit code, from another host's launcher
        self._chaos = chaos or Chaos()
        self._stdin = StandardInput(stdin)
        self.restarts = RestartPolicy(max_restarts)
        # Without restarts, one task starts no sooner.
        self._uses_spare = warm and not self._prefixes and (max_restarts > 0 or len(self._specs) > 1)
        self.failure: Failure | None = None
        self.lost_at: float | None = None

    def run(self) -> int:
        """Starts all tasks and waits until all have ended.

        Returns:
            0 if all tasks succeeded; 75 if tasks saved after SIGTERM and need a restart; else the first failure's exit
            code, or 128 + the number of the signal that ended the task or the launcher. With parameter servers the job
            ends with the chief, because servers never end by themselves.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._appends = not self._output.attempt(self._log_dir, set_logs_aside, self._log_dir, self._here)
        with handling_signals(self._signals.append):
            try:
                with (
                    temporary_folder(otherwise=self._log_dir) as self._progress,
                    Guardian(self._progress) as self._guardian,
                    self._spare() as self._warm,
                    EvaluatorProcess(self._create, self._output, self._guardian, self._progress) as self._evaluator,
                    self._rounds or contextlib.nullcontext(),
                ):
                    self._evaluator.is_over = not self._has_evaluator
                    servers = [spec for spec in self._specs if self._is_server(spec)]
                    if not self._stdin.is_read:  # the table would overwrite what is typed
                        self._output.start_table(self._specs + self._evaluator.waiting, servers, self._progress)
                    for _ in self._starts():
                        self._run_once()
                    if not self._preempted and self.failure is None:
                        self._evaluator.finish(lambda: bool(self._signals), self._refresh)
                    if not (self._preempted or self._signals or self.failure):
                        late_removal.remove_all_noted(self._progress, self._output.say)
                    received_sigterm = self._preempted or (self._signals and self._signals[0] != signal.SIGINT)
                    if received_sigterm and (advice := self._how_to_continue()):
                        self._output.say(advice)
                    alone = len(self._cluster.training_tasks()) > 1 and not progress.uses_tfdist(self._progress)
                    if alone and not (self._preempted or self._signals or self.failure):
                        self._output.say(_ALONE)
                    self._chaos.report(self._exit_code(), self._progress, self._output)
            finally:
                self._output.count_warnings()
                self._output.close(lambda: len(self._signals))
        return self._exit_code()

    def _exit_code(self) -> int:
        if self._preempted:
            return process_end.PREEMPTED
        if self._signals:
            return 128 + self._signals[0]
        return self.failure.status if self.failure else self._code or 0

    def _starts(self) -> Iterator[None]:
        """Yields before each start of the tasks, with their cluster set."""
        if self._rounds:
            yield from self._starts_on_hosts(self._rounds)
            return
        yield
        while self._restart and not self._signals:
            self._wait()
            if self._sizes:
                self._cluster = local.local_cluster(self._sizes.workers)
                self._specs = self._cluster.tasks()
            elif self._fresh_ports:  # another program may have taken a port
                self._cluster = local.on_free_ports(self._cluster)
            yield

    def _starts_on_hosts(self, rounds: Rounds) -> Iterator[None]:
        while isinstance(start := rounds.next_cluster(self._is_stopped, self.restarts.total), Start):
            self._cluster, self._specs, self.restarts.total = start.cluster, start.here, start.restarts
            yield
            if self._signals or self.failure or self._code is not None:
                break
            if not self._restart:
                rounds.ended(0)
                while not rounds.all_ended() and not self._restart and not self._is_stopped():
                    self._look_at_hosts(rounds)
                if not self._restart and rounds.leads:
                    break
            if self._restart:
                rounds.failed(self._why, self._saved)
                self._wait()
        else:
            self._code = start.code if isinstance(start, Done) else None
        code = self._exit_code()
        if rounds.leads or not self._signals:  # on a signal to this launcher the job continues on the other hosts
            rounds.ended(code, str(self.failure or "")) if code else rounds.finish(0)

    def _look_at_hosts(self, rounds: Rounds) -> None:
        """Ends the tasks if another host's launcher starts the job again, or ends it."""
        if self._signals or self._kill_at < float("inf") or not (interruption := rounds.interruption()):
            return
        self._why, self._restart = interruption.why, interruption.code is None
        if self._restart:
            self._saved = self._saved if interruption.saved is None else interruption.saved
            self.restarts.resized()
            self._output.say(
                f"{interruption.why}; starting again on the hosts that are there, from {self._from_where()}"
            )
        else:
            self._code = interruption.code
            self._output.say(f"{interruption.why}; ending all tasks")
        self._end(signal.SIGKILL, 0.0)

    def _is_stopped(self) -> bool:
        self._refresh()
        return bool(self._signals)

    def _run_once(self) -> None:
        """Starts all tasks, and returns when all have ended."""
        self._warm.wait(lambda: bool(self._signals))
        if self._signals:
            advice = self._how_to_continue(". ") if self._signals[0] == signal.SIGINT else ""
            self._output.say(f"{signal_name(self._signals[0])}: ending; no task runs{advice}")
            return
        self._output.attempt(self._progress, progress.clear, self._progress, self.restarts.total)
        self._output.attempt(self._progress, late_removal.begin, self._progress)
        self._restart = self._preempted = self._is_growing = False
        self._kill_at = float("inf")
        if self._sizes:
            self._sizes.started()
        try:
            with selectors.DefaultSelector() as self._selector:
                for spec in self._specs:
                    self._start(spec)
                if not (self.restarts.limit or self._sizes or self._has_evaluator):  # no other task will start
                    self._warm.close()
                self._watch()
        finally:
            for task in self._tasks:
                task.close()
            self._tasks = []

    def _spare(self) -> WarmSpare:
        environ = task_environ(self._environ, self._cluster, self._specs[0], self._progress, self._log_dir)
        return WarmSpare(self._command if self._uses_spare else None, environ, self._guardian)

    def _create(self, spec: TaskSpec, append: bool) -> TaskProcess:
        command = [*self._prefixes.get(spec, ()), *self._command]
        environ = task_environ(self._environ, self._cluster, spec, self._progress, self._log_dir)
        with self._guardian.starting():
            log, start = self._log_dir / f"{spec.name}.log", self._warm.start
            task = TaskProcess(spec, command, environ, log, append or self._appends, start, self._stdin.of(spec))
            self._guardian.watch(task.process.pid)
        return task

    def _start(self, spec: TaskSpec) -> None:
        self._tasks.append(task := self._create(spec, append=self.restarts.total > 0))
        self._running.append(task)
        self._selector.register(task.pipe, selectors.EVENT_READ, task)

    def _watch(self) -> None:
        handled = 0
        while self._running:
            for at, spec in [delayed for delayed in self._later if time.monotonic() >= delayed[0]]:
                self._later.remove((at, spec))
                self._start(spec)
            ready = [key.data for key, _ in self._selector.select(timeout=self._chaos.turn)]
            for task in ready:
                self._forward_output(task)
            for task in self._running:
                if task not in ready and self._stdin.is_typed_for(task.spec):
                    self._output.ask(task)
            self._refresh()
            self._grow()
            if self._rounds:
                self._look_at_hosts(self._rounds)
            # After Ctrl-C tracebacks contain nothing new, and a task may take seconds to end, because its peers do not answer.
            # After a failure they are its consequences.
            for task in self._running if not self.failure and signal.SIGINT not in self._signals else ():
                self._output.release_expired(task)
            if any(self._is_over(task) for task in self._running):
                self._take_ended()
            if len(self._signals) > handled:
                grace, advice = 0.0 if handled else self._grace_seconds, ""
                if self._signals[0] == signal.SIGINT:
                    grace, self._output.is_interrupted = min(grace, _AFTER_INTERRUPT), True
                    advice = "" if handled else self._how_to_continue(". ")
                if self._running:
                    name = signal_name(self._signals[handled])
                    last = (
                        f"; tasks that still run after {grace:g} s, or at another signal, are killed"
                        if grace
                        else " now"
                    )
                    self._output.say(f"{name}: ending all tasks{last}{advice}")
                self._end(self._signals[0], grace)
                handled = len(self._signals)
            if time.monotonic() > self._kill_at:
                for task in self._running:
                    task.signal(signal.SIGKILL)

    def _take_ended(self) -> None:
        # Look at all tasks again: if one task ended because of another, that other task has ended by now, too.
        ended = [task for task in self._running if self._is_over(task)]
        for task in ended:
            self._running.remove(task)
            # Processes that the task started may outlive it, and would keep its pipe open.
            task.signal(signal.SIGKILL)
            task.over = True
            self._forward_output(task, self._output.drain)
            self._guardian.unwatch(task.process.pid)
        for task in sorted(ended, key=TaskProcess.failures_by_cause):
            self._ended(task)

    def _is_over(self, task: TaskProcess) -> bool:
        # A shell dies of a signal at once; the processes that it runs have the full grace period.
        stopping = self._kill_at < float("inf") and time.monotonic() < self._kill_at
        return task.process.poll() is not None and not (stopping and task.signal(0))

    def _wait(self) -> None:
        """Waits before a restart; a signal ends the wait."""
        until = time.monotonic() + self.restarts.delay
        while time.monotonic() < until and not self._signals:
            self._refresh()
            time.sleep(0.05)

    def _refresh(self) -> None:
        self._stdin.forward()
        if not self._signals:
            self._evaluator.look()
        self._chaos.look(self._running, self._progress, self._output)
        later = self._specs if self._restart else [spec for _, spec in self._later]
        running = [*(task.spec for task in self._running), *self._evaluator.running]
        self._output.refresh(running, [*later, *self._evaluator.waiting], self._kill_at < float("inf"))

    def _forward_output(self, task: TaskProcess, forward: Callable[[TaskProcess], None] | None = None) -> None:
        (forward or self._output.forward)(task)
        if not task.open and task.pipe in self._selector.get_map():
            self._selector.unregister(task.pipe)

    def _ended(self, task: TaskProcess) -> None:
        code = task.process.returncode
        if self._kill_at < float("inf"):
            # The traceback of a task that fails because another one failed first stays in its log.
            was_signalled = bool(self._signals) and not self.failure and not self._is_server(task.spec)
            self._preempted |= was_signalled and code == process_end.PREEMPTED
            if self._is_growing and not code:  # the training has ended meanwhile
                self._restart = False
            return
        name, amid_fit = task.spec.name, progress.is_training(self._progress, task.spec.name)
        must_finish = self._must_finish and not self._is_server(task.spec)
        unfinished = not code and (amid_fit or (must_finish and not progress.has_finished(self._progress, name)))
        if unfinished and amid_fit and (steps := progress.read(self._progress, name)):
            self._failed(task, Failure(task.spec, code, f"step {steps.done}, epoch {steps.epoch}"))
        elif unfinished or code not in (0, process_end.PREEMPTED) or (code and self._is_server(task.spec)):
            reason = last_error_line(task.held or task.tail) if code else ""
            self._failed(task, Failure(task.spec, code, reason, task.loss))
        else:
            self._ended_well(task)

    def _ended_well(self, task: TaskProcess) -> None:
        self._output.release(task)
        if task.process.returncode == process_end.PREEMPTED:
            done, self._saved = self._steps(task)
            # Without progress since the last preemption this end counts as a failure.
            free = (done or 0) > self._last_preemption_step
            self._last_preemption_step, self._preempted = done or 0, True
            may_restart = self.restarts.limit > 0 or self._rounds is not None
            self._restart = may_restart and (free or not self.restarts.failed(done))
            self._why = f"{task.spec} ended after SIGTERM"
            then = f"; starting again from {self._from_where()}" if self._restart else ""
            self._output.say(f"{task.spec} ended after SIGTERM at step {done or 0}{then}")
            self._kill_at = time.monotonic() + self._grace_seconds  # the others are saving, too
            self.restarts.total += self._restart and free
        elif task.spec == self._cluster.chief and self._cluster.jobs.get("ps"):
            self._end(signal.SIGTERM, self._grace_seconds)

    def _failed(self, task: TaskProcess, failure: Failure) -> None:
        self.lost_at = time.time()
        alone = task.spec.type == "worker" and self._is_server(task.spec)
        done, self._saved = self._steps(task)
        if failure.loss:  # its errors are consequences, too: the log has them
            task.held = []
        lost = f"{failure.lost} lost" + (f" at step {done}" if done is not None else "") + f" ({failure.cause})"
        final = why_final(failure.exit_code, progress.has_refusal(self._progress), self._saved or 0, failure.reason)
        self._why = lost
        if not final and (size := self._other_size(failure, done)):
            self.restarts.resized()
            self._output.release(task)
            self._output.say(f"{lost}; continuing with {size} from {self._from_where()}. Full output: {task.log_path}")
            self._restart = True
            self._end(signal.SIGKILL, 0.0)
            return
        if not (why := final or self.restarts.failed(done)):
            count = f"restart {self.restarts.spent}/{self.restarts.limit}"
            self._output.release(task)
            if alone:
                self._output.say(f"{lost}; {count} from step {done or 0}, of {task.spec} alone")
                self._output.attempt(self._progress, progress.write_restarts, self._progress, self.restarts.total)
                self._later.append((time.monotonic() + self.restarts.delay, task.spec))
            else:
                has_no_backup_dir = done is not None and self._saved == 0 and not progress.is_backed_up(self._progress)
                why = ", because no backup_dir is set" if has_no_backup_dir else ""
                self._output.say(f"{lost}; {count} from {self._from_where()}{why}. Full output: {task.log_path}")
                self._restart = True
                self._end(signal.SIGKILL, 0.0)  # blocked in a collective, where tasks do not react to SIGTERM
            return
        gone = failure.exit_code < 0 or failure.exit_code == process_end.PREEMPTED
        if alone and gone and (self._later or any(other.spec.type == "worker" for other in self._running)):
            # Parameter servers hold the weights that this worker has trained.
            self._output.release(task)
            self._output.say(f"{failure}; the other workers continue")
            return
        self.failure = failure
        remedy = failure.remedy(self._saved)
        if lacks_answer(failure.reason):  # the traceback is that of the debugger
            remedy = self._stdin.remedy(task.spec)
        else:
            self._output.release(task)
        why = f"; {why}" if self.restarts.limit else ""
        self._output.say(f"{failure}{why}; ending all tasks. Full output: {task.log_path}{remedy}")
        self._end(signal.SIGTERM, min(self._grace_seconds, 2.0))  # after a failure tasks save nothing

    def _other_size(self, failure: Failure, done: int | None) -> str:
        """Returns the workers with which an elastic job continues after a loss; empty if it does not, or with as many."""
        if self._sizes and failure.exit_code < 0 and self._sizes.lost(done, self.restarts.is_left):
            return f"{self._sizes.workers} of {self._sizes.most} workers"
        if self._rounds and failure.is_of_another and (done or 0) > self._last_break_step:
            self._last_break_step = done or 0  # without progress since, the next such end counts as a failure
            return "the hosts that are there,"
        return ""

    def _grow(self) -> None:
        """Ends the tasks of an elastic job after a backup, so that they save and start again with more workers."""
        elastic = self._sizes or self._rounds
        if not elastic or elastic.is_full or self._signals or self._kill_at < float("inf"):
            return
        reports = [steps for spec in self._specs if (steps := progress.read(self._progress, spec.name))]
        if reports and elastic.should_grow(saved := max(steps.saved for steps in reports)):
            before = elastic.workers
            elastic.grow()
            self.restarts.resized()
            self._why = "the job grows"
            size = f"with {elastic.workers} workers instead of {before}" if self._sizes else "on more hosts"
            self._output.say(f"the backup of step {saved} is complete; starting again {size}")
            self._restart = self._is_growing = True
            self._end(signal.SIGTERM, self._grace_seconds)

    def _from_where(self) -> str:
        return "the chief's last backup, if there is one" if self._saved is None else f"step {self._saved}"

    def _steps(self, task: TaskProcess) -> tuple[int | None, int | None]:
        """Returns a task's step, None before its training, and the step of the last backup, None if unknown."""
        known = {spec: progress.read(self._progress, spec.name) for spec in self._specs}
        reports = [steps for steps in known.values() if steps]
        of_task = known[task.spec] or max(reports, default=None)
        return of_task and of_task.done, self._last_backup(reports)

    def _last_backup(self, reports: Sequence[progress.Steps]) -> int | None:
        if self._knows_backups:
            return max((steps.saved for steps in reports), default=self._saved)
        return 0 if reports and not progress.is_backed_up(self._progress) else None

    def _how_to_continue(self, before: str = "") -> str:
        """Returns the advice after a run that received a signal; empty if no task trains."""
        reports = [steps for spec in self._cluster.tasks() if (steps := progress.read(self._progress, spec.name))]
        return before + progress.how_to_continue(self._last_backup(reports)) if reports else ""

    def _is_server(self, task: TaskSpec) -> bool:
        """Returns whether a task is a worker or server under a chief, which saves for all tasks."""
        return bool(self._cluster.jobs.get("ps")) and task != self._cluster.chief

    def _end(self, number: int, grace: float) -> None:
        """Sends a signal to the running tasks, and schedules SIGKILL after the grace period."""
        self._later = []
        self._kill_at = min(self._kill_at, time.monotonic() + grace)
        for task in self._running:
            task.signal(number)
