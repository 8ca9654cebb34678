"""The supervisor: it decides when the tasks of a cluster on this machine start again, and when they end. No TensorFlow here."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import IO

from tfdist.cluster.spec import split_address
from tfdist.errors import list_first
from tfdist.launch.evaluator_process import EvaluatorProcess
from tfdist.launch.failure import Failure, last_backup, signal_name
from tfdist.launch.guardian import Guardian
from tfdist.launch.options import Options
from tfdist.launch.output import LauncherOutput
from tfdist.launch.process import TaskProcess, handling_signals, set_logs_aside
from tfdist.launch.restart_policy import RestartPolicy, why_final
from tfdist.launch.standard_input import StandardInput
from tfdist.launch.start import Host, Start
from tfdist.launch.warm import WarmSpare
from tfdist.runtime.end import process_end
from tfdist.runtime.folders import finished_training
from tfdist.runtime.folders.temporary import temporary_folder
from tfdist.runtime.report import progress
from tfdist.runtime.report.ending import Kind

_ALONE = (
    "no task has created a tfdist.Trainer or strategy: unless the command connects the tasks itself, each ran alone"
)
_TURN = 0.05  # seconds between two looks while no task runs
# Seconds that tasks have after Ctrl-C: they save nothing then, and may wait for each other.
AFTER_INTERRUPT = 2.0
# Seconds that tasks have after the failure of another task: they save nothing then.
_AFTER_FAILURE = 2.0


class Launcher:
    """Supervisor that runs one command as every task of a cluster, and restarts tasks that fail, if restarts are allowed.

    All tasks of a synchronous cluster restart together, because the others cannot continue without the failed task. With
    parameter servers all tasks restart if the chief or a server fails; a worker restarts alone. A task that ends with exit
    code 75 after SIGTERM requests a restart, too; this is not a failure, and uses no restart.

    Args:
        options: The command, its cluster, and the rules for its starts.
        output: The stream for the tasks' lines. None means this process's standard output.
        host: The class that starts the tasks, or a function with the arguments of `Host`.

    Attributes:
        failure: The failure that ended the last `run`, or None.
        signals: The numbers of the signals that `run` has received.
        lost_at: The time of the last failure, in seconds since the epoch, or None.

    Examples:
        >>> import sys, tempfile
        >>> from tfdist.cluster import local_cluster
        >>> from tfdist.launch import Launcher, Options
        >>> options = Options([sys.executable, "train.py"], local_cluster(workers=2), tempfile.mkdtemp(), max_restarts=3)
        >>> launcher = Launcher(options)
        >>> # sys.exit(launcher.run())
    """

    def __init__(self, options: Options, output: IO[bytes] | None = None, host: Callable[..., Host] = Host):
        self._options = options
        self._new_host = host
        self._output = LauncherOutput(output, options.log_dir)
        self.signals: list[int] = []
        self._restarts = RestartPolicy(options.max_restarts)
        self._saved: int | None = 0  # the step of the last backup; None if only another host's launcher knows it
        self._last_preemption_step = -1  # the step at which the tasks last ended after SIGTERM
        self.failure: Failure | None = None
        self.lost_at: float | None = None

    def run(self) -> int:
        """Starts all tasks and waits until all have ended.

        Returns:
            0 if all tasks succeeded; 75 if tasks saved after SIGTERM and need a restart; else the first failure's exit code, or 128 +
            the number of the signal that ended the task or the launcher. With parameter servers the job ends with the chief.
        """
        options, output = self._options, self._output
        log_dir = pathlib.Path(options.log_dir)
        log_dir.mkdir(parents=True, exist_ok=True)
        output.attempt(log_dir, set_logs_aside, log_dir, options.here)
        with handling_signals(self.signals.append):
            try:
                # In this order: the guardian must run before the spare and the tasks start, and ends after them.
                with (
                    temporary_folder(otherwise=log_dir) as folder,
                    Guardian(folder) as guardian,
                    _warm_spare(options, folder, guardian) as spare,
                    self._new_host(
                        options, output, folder, guardian, spare, StandardInput(options.stdin)
                    ) as self._host,
                ):
                    self._start = Start(self._host, options.cluster, options.here)
                    with EvaluatorProcess(self._host) as self._evaluator:
                        self._run_job()
            finally:
                output.count_warnings()
                output.close(lambda: len(self.signals))
        return self._exit_code()

    def _run_job(self) -> None:
        if not self._host.stdin.is_read:  # the table would overwrite what is typed
            specs = self._start.specs
            servers = [spec for spec in specs if self._start.is_server(spec)]
            self._output.start_table(specs + self._evaluator.waiting, servers, self._host.folder)
        elsewhere = _elsewhere(self._options)
        if elsewhere:
            self._output.say(elsewhere)
        for start in self._starts():
            self._run_start(start)
        if not self._start.preempted and self.failure is None:
            self._evaluator.finish(lambda: bool(self.signals), self._refresh)
        # After Ctrl-C the first message has contained the advice.
        if self._start.preempted or (self.signals and self.signals[0] != signal.SIGINT):
            advice = self._how_to_continue()
            if advice:
                self._output.say(advice)
        if self._start.preempted or self.signals or self.failure:
            return
        finished_training.remove_of_this_run(progress.folders_with_backups(self._host.folder), self._output.say)
        if len(self._start.cluster.training_tasks()) > 1 and not progress.read_all(self._host.folder):
            self._output.say(_ALONE)

    def _exit_code(self) -> int:
        if self._start.preempted:
            return process_end.PREEMPTED
        if self.signals:
            return 128 + self.signals[0]
        if self.failure:
            return self.failure.status
        return 0

    def _starts(self) -> Iterator[Start]:
        """Yields the starts of the tasks; `self._start` is the last one that has begun."""
        options = self._options
        before = None
        while before is None or (self._start.restart and not self.signals):
            if before:
                self._wait()
            yield Start(self._host, self._host.next_cluster(before, self._is_stopped), options.here)
            before = self._start.cluster

    def _is_stopped(self) -> bool:
        self._refresh()
        return bool(self.signals)

    def _run_start(self, start: Start) -> None:
        """Starts all tasks, and returns when all have ended."""
        self._host.spare.wait(lambda: bool(self.signals))
        if self.signals:
            advice = ""
            if self.signals[0] == signal.SIGINT:
                advice = self._how_to_continue(". ")
            self._output.say(f"{signal_name(self.signals[0])}: ending; no task runs{advice}")
            return
        self._start = start
        folder = self._host.folder
        self._output.attempt(folder, progress.clear, folder, self._restarts.total)
        if self._options.sizes:
            self._options.sizes.started()
        start.run(self._on_turn)

    def _on_turn(self, ended: list[TaskProcess]) -> None:
        """Reacts to backups, to tasks that have ended, and to signals."""
        start = self._start
        self._grow()
        for task in ended:
            self._ended(task)
        if len(self.signals) > start.signals_handled:
            self._handle_signals()
        # After Ctrl-C tracebacks contain nothing new, and a task may take seconds to end, because its peers do not answer.
        # After a failure they are its consequences.
        if not self.failure and signal.SIGINT not in self.signals:
            for task in start.running:
                self._output.release_expired(task)
        self._refresh()

    def _handle_signals(self) -> None:
        """Ends all tasks: at the first signal in the grace period, at another one at once."""
        start, received = self._start, len(self.signals)  # one that arrives from here on is for the next turn
        is_first = not start.signals_handled
        grace = self._options.grace_seconds if is_first else 0.0
        advice = ""
        if self.signals[0] == signal.SIGINT:
            grace = min(grace, AFTER_INTERRUPT)
            self._output.is_interrupted = True
            if is_first:
                advice = self._how_to_continue(". ")
        if start.running:
            name = signal_name(self.signals[start.signals_handled])
            limit = " now"
            if grace:
                limit = f"; tasks that still run after {grace:g} s, or at another signal, are killed"
            self._output.say(f"{name}: ending all tasks{limit}{advice}")
        start.end(grace, self.signals[0])
        start.signals_handled = received

    def _wait(self) -> None:
        """Waits before a restart; a signal ends the wait."""
        until = time.monotonic() + self._restarts.delay
        while time.monotonic() < until and not self._is_stopped():
            time.sleep(_TURN)

    def _refresh(self) -> None:
        self._host.stdin.forward()
        if not self.signals:
            self._evaluator.look()
        start, evaluator = self._start, self._evaluator
        running = [task.spec for task in start.running] + evaluator.running
        self._output.refresh(running, start.waiting + evaluator.waiting, start.kill_at is not None)

    def _ended(self, task: TaskProcess) -> None:
        start = self._start
        code = task.process.returncode
        is_server = start.is_server(task.spec)
        failure = task.failure()
        if start.kill_at is not None:
            # All tasks share an error of the configuration; another task may have failed first, because its peer had ended.
            if self.failure and failure.kind is Kind.CONFIG and self.failure.kind is not Kind.CONFIG:
                self.failure = failure
                self._output.say(f"{failure}. Full output: {task.log_path}")
            # The traceback of a task that fails because another one failed first stays in its log.
            if self.signals and not self.failure and not is_server and code == process_end.PREEMPTED:
                start.preempted = True
            if start.is_growing and not code:  # the training has ended meanwhile
                start.restart = False
            return
        own = progress.read(self._host.folder, task.spec.name)
        must_finish = self._options.must_finish and not is_server
        if code == 0 and not own.trains and (own.finished or not must_finish):
            self._succeeded(task)
        elif code == process_end.PREEMPTED and not is_server:
            self._preempted(task)
        else:
            self._failed(task, failure)

    def _succeeded(self, task: TaskProcess) -> None:
        self._output.release(task)
        if self._start.cluster.jobs.get("ps") and task.spec == self._start.cluster.chief:
            self._start.end(self._options.grace_seconds, signal.SIGTERM)

    def _preempted(self, task: TaskProcess) -> None:
        start = self._start
        self._output.release(task)
        done = self._note_progress(task)
        step = done or 0
        # Without progress since the last preemption this end counts as a failure.
        is_free = step > self._last_preemption_step
        self._last_preemption_step = step
        start.preempted = True
        start.restart = self._options.max_restarts > 0 and (is_free or not self._restarts.failed(done))
        next_step = ""
        if start.restart:
            next_step = f"; starting again from {last_backup(self._saved)}"
            self._restarts.total += is_free
        self._output.say(f"{task.spec} ended after SIGTERM at step {step}{next_step}")
        start.end(self._options.grace_seconds)  # without a signal, because the others are saving, too

    def _failed(self, task: TaskProcess, failure: Failure) -> None:
        start = self._start
        self.lost_at = time.time()
        done = self._note_progress(task)
        if failure.loss:  # its errors are consequences, too: the log has them
            task.held = []
        step = ""
        if done is not None:
            step = f" at step {done}"
        loss = f"{failure.lost} lost{step} ({failure.cause})"
        has_refusal = any(record.refused for record in progress.read_all(self._host.folder))
        final = why_final(Kind.REFUSED if has_refusal else failure.kind, self._saved or 0)
        size = None if final else self._other_size(failure, done)
        where = last_backup(self._saved)
        if size:
            self._restarts.resized()
            self._output.release(task)
            self._output.say(f"{loss}; continuing with {size} from {where}. Full output: {task.log_path}")
            self._end_for_restart()
            return
        why = final or self._restarts.failed(done)
        if why:
            self._give_up(task, failure, why)
            return
        self._output.release(task)
        spent, limit = self._restarts.spent, self._restarts.limit
        if self._is_alone(task):
            self._output.say(f"{loss}; restart {spent}/{limit} from step {done or 0}, of {task.spec} alone")
            folder = self._host.folder
            self._output.attempt(folder, progress.write_restarts, folder, self._restarts.total)
            self._output.attempt(folder, progress.forget_end, folder, task.spec.name)
            start.restart_alone(task.spec, self._restarts.delay)
            return
        if done is not None and self._saved == 0 and not progress.is_backed_up(self._host.folder):
            where += ", because no backup_dir is set"
        self._output.say(f"{loss}; restart {spent}/{limit} from {where}. Full output: {task.log_path}")
        self._end_for_restart()

    def _is_alone(self, task: TaskProcess) -> bool:
        """Returns whether a task's loss does not affect the others: parameter servers hold the weights that a worker has trained."""
        return task.spec.type == "worker" and self._start.is_server(task.spec)

    def _end_for_restart(self) -> None:
        """Ends all tasks after the loss of one, so that they start again."""
        self._start.restart = True
        # SIGKILL at once: the others are blocked in a collective, where they do not react to SIGTERM, and have nothing to save.
        self._start.end(0.0, signal.SIGKILL)

    def _give_up(self, task: TaskProcess, failure: Failure, why: str) -> None:
        """Ends the job with a failure, unless other workers can continue without the task."""
        is_gone = failure.is_killed or failure.kind is Kind.PREEMPTED
        if is_gone and self._is_alone(task) and self._start.has_other_workers():
            self._output.release(task)
            self._output.say(f"{failure}; the other workers continue")
            return
        self.failure = failure
        remedy = failure.remedy(self._saved)
        if failure.kind is Kind.INPUT:  # the traceback is that of the debugger
            remedy = self._host.stdin.remedy(task.spec)
        else:
            self._output.release(task)
        reason = ""
        if self._restarts.limit:
            reason = f"; {why}"
        self._output.say(f"{failure}{reason}; ending all tasks. Full output: {task.log_path}{remedy}")
        self._start.end(min(self._options.grace_seconds, _AFTER_FAILURE), signal.SIGTERM)

    def _other_size(self, failure: Failure, done: int | None) -> str:
        """Returns the workers with which an elastic job continues after a loss; empty if it does not, or with as many."""
        sizes = self._options.sizes
        if sizes and failure.is_killed and sizes.lost(done, self._restarts.is_left):
            return f"{sizes.workers} of {sizes.most} workers"
        return ""

    def _grow(self) -> None:
        """Ends the tasks of an elastic job after a backup, so that they save and start again with more workers."""
        start, sizes = self._start, self._options.sizes
        if not sizes or sizes.is_full or self.signals or start.kill_at is not None:
            return
        saved = max((steps.saved for steps in start.reports()), default=None)
        if saved is None or not sizes.should_grow(saved):
            return
        before = sizes.workers
        sizes.grow()
        self._restarts.resized()
        size = f"with {sizes.workers} workers instead of {before}"
        self._output.say(f"the backup of step {saved} is complete; starting again {size}")
        start.restart = True
        start.is_growing = True
        start.end(self._options.grace_seconds, signal.SIGTERM)

    def _note_progress(self, task: TaskProcess) -> int | None:
        """Notes the step of the last backup; returns a task's step, or None before its training."""
        reports = self._start.reports()
        self._saved = self._last_backup(reports)
        own = progress.read(self._host.folder, task.spec.name)
        if own.begun:
            return own.done
        return max((report.done for report in reports), default=None)  # a server has no steps

    def _last_backup(self, reports: list[progress.Progress]) -> int | None:
        if self._start.cluster.chief in self._start.specs:  # only the chief reports backups
            return max((steps.saved for steps in reports), default=self._saved)
        if reports and not progress.is_backed_up(self._host.folder):
            return 0
        return None

    def _how_to_continue(self, before: str = "") -> str:
        """Returns the advice after a run that received a signal; empty if no task trains."""
        reports = self._start.reports()
        if not reports:
            return ""
        return before + progress.how_to_continue(self._last_backup(reports))


def _warm_spare(options: Options, folder: str, guardian: Guardian) -> WarmSpare:
    specs = options.here or options.cluster.tasks()
    # Without restarts, one task starts no sooner.
    is_useful = options.warm and not options.prefixes and (options.max_restarts > 0 or len(specs) > 1)
    command = options.command if is_useful else ()
    return WarmSpare(command, options.task_environ(options.cluster, specs[0], folder), guardian)


def _elsewhere(options: Options) -> str:
    """Returns where the tasks of a cluster of hosts start, and where the progress is printed; an empty text if all start here."""
    cluster = options.cluster
    here = options.here or cluster.tasks()
    on_host = {task: f"{task} on {split_address(cluster.address(task))[0]}" for task in cluster.tasks()}
    others = [name for task, name in on_host.items() if task not in here]
    if not others:
        return ""
    text = f"starting {list_first(list(map(str, here)), 4)} here; the same command starts {list_first(others, 4)}"
    if cluster.chief not in here:
        text += f". The progress is printed by {on_host[cluster.chief]}"
    return text
