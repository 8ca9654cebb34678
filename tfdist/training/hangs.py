"""Warnings about tasks that others wait for, and the end of jobs that are stuck.

Each task has a thread that publishes a report of the task's activity every few seconds, through TensorFlow's coordination service. The first
task that has waited for long reads the reports. It warns of the tasks that it waits for, with their lines, and ends the job only if
a task exceeds its limit, or if all tasks wait for each other. The verdict is published, so that all tasks end with the same message.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Mapping

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.collectives import calls
from tfdist.compat import tf_cluster
from tfdist.runtime.end import hooks, process_end
from tfdist.runtime.log import logger
from tfdist.runtime.report import stacks, work
from tfdist.runtime.report.phase import Phase, Phases
from tfdist.runtime.report.phase import main as phases_of_process
from tfdist.runtime.report.task_report import TIMEOUT_SECONDS, Report, Reporter

REASON_PREFIX = "tfdist: "  # begins the reason with which this process aborts the collectives of all workers
HANG = " has waited "  # part of the reason if a task hangs
_VERDICT = "tfdist/hang"
_REPORT = "tfdist/report/"
_END_AFTER = 10.0  # seconds after which the named task ends its process
_NOISE = 10_000.0  # bytes per second and task that the watches themselves send
REMEDY = "Start all tasks again, to continue from the last backup if there is one."
_watch: HangWatch | None = None


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of the watch in seconds. Tests scale them.

    Attributes:
        look_every: The interval at which a task looks for a verdict.
        report_every: The interval of the reports. A deadlock is confirmed by two of them.
        warn_after: The least wait that is warned about.
    """

    look_every: float = 1.0
    report_every: float = 10.0
    warn_after: float = 60.0


timing = Timing()


@dataclasses.dataclass
class Verdict:
    """The end of a job.

    Attributes:
        message: The error message of all tasks, without the remedy.
        named: The tasks that the others wait for.
    """

    message: str
    named: list[str]


def awaited_tasks(reports: Mapping[str, Report], asker: str) -> dict[str, Report]:
    """Returns the tasks that `asker` waits for; empty if all tasks wait.

    A task that computes its step may do so beside a wait, as the threads that prepare the next batch. So it is awaited only if no other task
    is in the user's code or waits for data.
    """
    others = {task: report for task, report in reports.items() if task != asker}
    slow = {task: report for task, report in others.items() if report.state in ("user", "data")}
    return slow or {task: report for task, report in others.items() if report.state == "computes"}


def verdict(
    reports: Mapping[str, Report], before: Mapping[str, Report], asker: str, timeout_seconds: float
) -> Verdict | None:
    """Returns the end of the job, or None if it continues.

    `before` holds the reports of all tasks some seconds ago; `asker` has waited for long; 0 seconds mean no limit.
    """
    own = reports[asker]
    if not timeout_seconds or own.state != "waits":
        return None
    awaited = awaited_tasks(reports, asker)
    if awaited:
        overruns = {task: report.overrun(own.waited, timeout_seconds) for task, report in awaited.items()}
        named = [task for task, overrun in overruns.items() if overrun]
        if not named:
            return None
        what = "; ".join(f"{task} {awaited[task].describe()}" for task in named)
        return Verdict(
            f"{what}; {asker} has waited {own.waited:.0f} s for it in {_where(own)}. {overruns[named[0]]}. If this work is only slow, raise "
            f"Trainer(timeout_seconds={timeout_seconds:g}), or use tfdist.slow",
            named,
        )
    if not _is_confirmed(reports, before):
        return None
    if len({report.call for report in reports.values()}) == 1:
        # The patience grows while tasks compile: some collectives wait for it.
        if own.waited < timing.warn_after * max(report.patience for report in reports.values()):
            return None
        what = f"all tasks wait in {_where(own)}, and none computes"
        named = list(reports)
    else:
        what = "; ".join(f"{task} {report.describe()}" for task, report in reports.items())
        last = max((report.steps, report.exchanges) for report in reports.values())
        named = [task for task, report in reports.items() if (report.steps, report.exchanges) < last]
    return Verdict(
        f"{what}: a deadlock, in which {asker} has waited {own.waited:.0f} s. All tasks must make the same calls in the same order",
        named,
    )


def warn(reports: Mapping[str, Report], asker: str, timeout_seconds: float) -> bool:
    """Warns of the tasks that `asker` waits for; returns whether there are any."""
    awaited = awaited_tasks(reports, asker)
    if not awaited:
        return False
    names = ", and ".join(f"{task}, which {report.describe()}" for task, report in awaited.items())
    limit = f" (Trainer(timeout_seconds={timeout_seconds:g}) is its limit)" if timeout_seconds else ""
    logger.warning(f"{asker} has waited {reports[asker].waited:.0f} s for {names}; the job goes on{limit}")
    return True


def _is_confirmed(reports: Mapping[str, Report], before: Mapping[str, Report]) -> bool:
    """Returns whether all tasks wait in the collectives in which they have waited before, while the network is quiet."""
    if not work.is_known():  # without signs of work, all may compute
        return False
    for task, report in reports.items():
        then = before.get(task)
        if then is None or then.number >= report.number or then.call != report.call or then.state != "waits":
            return False
        seconds = report.waited - then.waited
        # A large exchange may take long. It is no deadlock while bytes move, other than those of the reports themselves.
        if seconds <= 0 or abs(report.transferred - then.transferred) > _NOISE * len(reports) * seconds:
            return False
    return True


def _where(report: Report) -> str:
    if report.wait == "step":
        return f"step {report.steps}"
    return f"an exchange after step {report.steps}"


class HangWatch:
    """Thread that publishes this task's reports, and reads those of the others if this task waits for long. It runs until the process ends.

    A limit of 0 seconds means no limit, None the default.
    """

    def __init__(
        self, cluster: ClusterSpec, task: TaskSpec, timeout_seconds: float | None, phases: Phases = phases_of_process
    ):
        self._task = str(task)
        self._phases = phases
        self._tasks = [str(other) for other in cluster.training_tasks()]
        self._limit = TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        self._before: dict[str, Report] = {}
        self._advanced: dict[str, tuple[int, float]] = {}  # the number of each task's last report, and when it was new
        self._warned = (phases.now, 0.0)  # the wait that the last warning was about, and its seconds
        self._over = threading.Event()
        self._due = time.monotonic() + timing.report_every  # the time of the next report

    def start(self) -> None:
        """Starts the thread."""
        self._phases.watched = True
        thread = threading.Thread(target=self._run, daemon=True, name="tfdist-hangs")
        # debugpy stops all threads but those with these attributes, and this one reports that the main thread is stopped.
        vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)
        thread.start()

        # The hook that is registered last runs first: this one before TensorFlow's shutdown.
        def stop() -> None:
            self._over.set()
            thread.join(timing.look_every)

        hooks.at_end(hooks.Stage.WATCH, stop)

    def _run(self) -> None:
        reporter = Reporter(self._phases)
        failed = False
        while not self._over.wait(timing.look_every):
            try:
                self._look(reporter)
            except Exception as e:
                if not failed:
                    failed = True
                    reason = f"{type(e).__name__}: {e}"
                    logger.warning(f"the watch for stuck tasks failed ({reason}); it looks again each second")

    def _look(self, reporter: Reporter) -> None:
        """Obeys a verdict, and reports if it is time to."""
        found = tf_cluster.find_published(_VERDICT, 0.01)
        if found:
            self._end(Verdict(**json.loads(found)))
            return
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + timing.report_every
        # Before the report: if the wait ends and another begins meanwhile, the verdict must not be about the new one.
        wait = self._phases.now
        own = reporter.report(timing.warn_after)
        try:
            tf_cluster.replace(f"{_REPORT}{self._task}", json.dumps(dataclasses.asdict(own)))
        except tf.errors.OpError:  # the chief has ended, which the watch for lost tasks reports
            pass
        if own.asks and own.state == "waits":
            self._judge(wait, self._reports(own))

    def _reports(self, own: Report) -> dict[str, Report]:
        """Returns the reports of all tasks; empty if an earlier task asks, too, and so decides."""
        reports: dict[str, Report] = {}
        for task in self._tasks:
            if task == self._task:
                reports[task] = own
                continue
            reports[task] = self._report(task)
            # Earlier in the order of tasks, which is the same for all: so one task decides.
            if len(reports) <= self._tasks.index(self._task) and reports[task].asks and reports[task].state == "waits":
                return {}
        return reports

    def _report(self, task: str) -> Report:
        """Returns the last report of another task. If the task reports no more, it may be stopped, which another watch finds out; or a library keeps Python's lock."""
        text = tf_cluster.find_published(f"{_REPORT}{task}", 0.5)
        report = Report(**json.loads(text or "{}"))
        now = time.monotonic()
        number, since = self._advanced.setdefault(task, (report.number, now))
        if report.number != number:
            self._advanced[task] = report.number, now
        elif now - since > 4 * timing.report_every:
            return Report(report.number, state="user", place=report.place, activity=report.activity, is_silent=True)
        return report

    def _judge(self, wait: Phase, reports: dict[str, Report]) -> None:
        """Ends the job or warns, as the reports require; an earlier task does so if there are none."""
        if not reports:
            return
        found = verdict(reports, self._before, self._task, self._limit)
        self._before = reports
        if self._phases.now is not wait:  # the wait has ended meanwhile
            return
        if found:
            # If another task was first, its verdict counts, which `_run` finds.
            if tf_cluster.try_publish(_VERDICT, json.dumps(dataclasses.asdict(found))):
                self._end(found)
            return
        warned, seconds = self._warned
        if warned is wait and reports[self._task].waited < 2 * seconds:
            return
        if warn(reports, self._task, self._limit):
            self._warned = wait, reports[self._task].waited

    def _end(self, verdict: Verdict) -> None:
        """Aborts this task's collectives. If the task is named and has not ended after 10 s, ends its process."""
        stacks.dump(verdict.message)
        is_named = self._task in verdict.named
        # The watch for lost tasks reads `lost` from the reason.
        ending = f" (lost={', '.join(verdict.named)})"
        if is_named:
            ending = f". {REMEDY}"
        calls.abort_collectives(tf.errors.UNAVAILABLE, f"{REASON_PREFIX}{verdict.message}{ending}")
        if is_named:
            if not self._phases.now.is_wait:
                logger.error(f"{verdict.message}{ending}")
            if not self._over.wait(_END_AFTER):
                process_end.end(1)
        self._over.set()


def start_watch(cluster: ClusterSpec, task: TaskSpec, timeout_seconds: float | None) -> None:
    """Starts the watch of this process, once."""
    global _watch
    if _watch is None:
        _watch = HangWatch(cluster, task, timeout_seconds)
        _watch.start()
