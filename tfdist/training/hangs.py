"""Warnings about tasks that others wait for, and the end of jobs that are stuck.

Each task has a thread that publishes a report of the task's activity every few seconds, through TensorFlow's coordination service. The first
task that has waited for long reads the reports. It warns of the tasks that it waits for, with their lines, and ends the job only if
a task exceeds its limit, or if all tasks wait for each other. The verdict is published, so that all tasks end with the same message.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Mapping

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.collectives import calls
from tfdist.compat import tf_cluster
from tfdist.runtime import process_end, stacks
from tfdist.runtime.log import logger
from tfdist.runtime.phase import Phase, Phases
from tfdist.runtime.phase import main as phases_of_process
from tfdist.runtime.task_report import TIMEOUT_SECONDS, Report, Reporter

REASON_PREFIX = "tfdist: "  # begins the reason with which this process aborts the collectives of all workers
HANG = " has waited "  # part of the reason if a task hangs
_VERDICT = "tfdist/hang"
_REPORT = "tfdist/report/"
_END_AFTER = 10.0  # seconds after which the named task ends its process
_NOISE = 10_000.0  # bytes per second and task that the watches themselves send
_REMEDY = "Start all tasks again, to continue from the last backup if there is one."
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

    Args:
        reports: The reports of all tasks.
        before: Their reports some seconds ago.
        asker: A task that has waited for long.
        timeout_seconds: `Trainer(timeout_seconds=...)`; 0 means no limit.
    """
    own = reports[asker]
    if not timeout_seconds or own.state != "waits":
        return None
    if awaited := awaited_tasks(reports, asker):
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
        if own.waited < timing.warn_after * max(report.patience for report in reports.values()):
            return None  # some collectives wait while others compile
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
    if awaited:
        names = ", and ".join(f"{task}, which {report.describe()}" for task, report in awaited.items())
        limit = f" (Trainer(timeout_seconds={timeout_seconds:g}) is its limit)" if timeout_seconds else ""
        logger.warning(f"{asker} has waited {reports[asker].waited:.0f} s for {names}; the job goes on{limit}")
    return bool(awaited)


def _is_confirmed(reports: Mapping[str, Report], before: Mapping[str, Report]) -> bool:
    """Returns whether all tasks wait in the collectives in which they have waited before, while the network is quiet."""
    for task, report in reports.items():
        then = before.get(task)
        if then is None or then.number >= report.number or then.call != report.call or then.state != "waits":
            return False
        seconds = report.waited - then.waited
        if seconds <= 0 or abs(report.transferred - then.transferred) > _NOISE * len(reports) * seconds:
            return False
    return True


def _where(report: Report) -> str:
    return f"step {report.steps}" if report.wait == "step" else f"an exchange after step {report.steps}"


class HangWatch:
    """Thread that publishes this task's reports, and reads those of the others if this task waits for long. It runs until the process ends.

    Args:
        cluster: The cluster.
        task: This process's task.
        timeout_seconds: The limit; 0 means no limit, None the default.
        phases: This process's phases.
    """

    def __init__(
        self, cluster: ClusterSpec, task: TaskSpec, timeout_seconds: float | None, phases: Phases = phases_of_process
    ):
        self._task, self._phases = str(task), phases
        self._tasks = [str(other) for other in cluster.training_tasks()]
        self._limit = TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        self._before: dict[str, Report] = {}
        self._advanced: dict[str, tuple[int, float]] = {}  # the number of each task's last report, and when it was new
        self._warned = (phases.now, 0.0)  # the wait that the last warning was about, and its seconds
        self._over = threading.Event()

    @property
    def is_late(self) -> bool:
        """Returns whether this task has waited for long."""
        return self._phases.waited() > self._phases.long_wait(timing.warn_after)

    def start(self) -> None:
        """Starts the thread."""
        self._phases.watched = True
        thread = threading.Thread(target=self._run, daemon=True, name="tfdist-hangs")
        # debugpy stops all threads but those with these attributes, and this one reports that the main thread is stopped.
        vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)
        thread.start()

        def stop() -> None:  # before TensorFlow's shutdown
            self._over.set()
            thread.join(timing.look_every)

        atexit.register(stop)

    def _run(self) -> None:
        reporter, due = Reporter(self._phases), time.monotonic() + timing.report_every
        while not self._over.wait(timing.look_every):
            stacks.answer_request()
            with contextlib.suppress(tf.errors.OpError):
                self._end(Verdict(**json.loads(tf_cluster.published(_VERDICT, 0.01))))
                return
            if time.monotonic() < due:
                continue
            due = time.monotonic() + timing.report_every
            wait, own = self._phases.now, reporter.report(timing.warn_after)
            with contextlib.suppress(tf.errors.OpError):
                tf_cluster.replace(f"{_REPORT}{self._task}", json.dumps(dataclasses.asdict(own)))
            if own.asks and own.state == "waits" and (reports := self._reports(own)):
                self._judge(wait, reports)

    def _reports(self, own: Report) -> dict[str, Report]:
        """Returns the reports of all tasks; empty if an earlier task asks, too, and so decides."""
        reports: dict[str, Report] = {}
        for task in self._tasks:
            if task == self._task:
                reports[task] = own
                continue
            reports[task] = self._report(task)
            if len(reports) <= self._tasks.index(self._task) and reports[task].asks and reports[task].state == "waits":
                return {}
        return reports

    def _report(self, task: str) -> Report:
        """Returns the last report of another task. If the task reports no more, it may be stopped, which another watch finds out; or a library keeps Python's lock."""
        report = Report()
        with contextlib.suppress(tf.errors.OpError):
            report = Report(**json.loads(tf_cluster.published(f"{_REPORT}{task}", 0.5)))
        now = time.monotonic()
        number, since = self._advanced.setdefault(task, (report.number, now))
        if report.number != number:
            self._advanced[task] = report.number, now
        elif now - since > 4 * timing.report_every:
            return Report(report.number, state="user", place=report.place, activity=report.activity, is_silent=True)
        return report

    def _judge(self, wait: Phase, reports: dict[str, Report]) -> None:
        found = verdict(reports, self._before, self._task, self._limit)
        self._before = reports
        if self._phases.now is not wait:  # the wait has ended meanwhile
            return
        if found:
            with contextlib.suppress(tf.errors.OpError):  # another task may have been first
                tf_cluster.publish(_VERDICT, json.dumps(dataclasses.asdict(found)))
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
        ending = (
            f". {_REMEDY}" if is_named else f" (lost={', '.join(verdict.named)})"
        )  # read by the watch for lost tasks
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


def is_late() -> bool:
    """Returns whether this task has waited for long."""
    return _watch is not None and _watch.is_late
