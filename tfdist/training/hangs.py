"""Bounded waits: the watch that names the task that the others wait for, with its line, and ends the wait.

Each task has a thread that looks each second. If its task has waited longer than the limit, it asks all tasks through TensorFlow's
coordination service. Each task writes its stacks to its log and publishes a report; the task that asked decides, and publishes its verdict.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, reachability
from tfdist.collectives import calls
from tfdist.compat import tf_cluster
from tfdist.runtime import process_end, stacks
from tfdist.runtime.activity import FIRST, Activity
from tfdist.runtime.activity import main as activity
from tfdist.runtime.log import logger

REASON_PREFIX = "tfdist: "  # begins the reason with which this process aborts the collectives of all workers
HANG = "longer than the limit of "  # part of the reason if a task hangs
_LOOK_EVERY = 1.0  # seconds
_ANSWER_WITHIN = 3.0  # seconds in which a task's thread answers
_LATE_ANSWER_WITHIN = 10.0  # further seconds for a task whose port answers: its machine may be overloaded
_VERDICT_WITHIN = 25.0  # seconds to wait for the verdict
_END_AFTER = 10.0  # seconds after which the named task ends its process
_READ_WITHIN = 1.0  # seconds to read a variable, which may wait for TensorFlow
_WAITS_ON = "-"  # the verdict that no task hangs
_REMEDY = "Start all tasks again, to continue from the last backup if there is one."
_watch: HangWatch | None = None


@dataclasses.dataclass
class Report:
    """Report of a task's activity.

    Attributes:
        phase: `"step"` or `"exchange"` (waits for others), `"data"` (its step waits for its own data), `"building"` (a model), `"saving"`,
            `"evaluating"`, `"user"` for anything else, `"silent"` without an answer.
        first: Whether it may compile: a first execution of its step, or the building of a model.
        place: The line of the user's program.
        step: The number of executions that it has begun.
        waited: The seconds of its current wait.
    """

    phase: str
    first: bool = False
    place: str = ""
    step: int = 0
    waited: float = 0.0

    @classmethod
    def of_this_task(cls) -> Report:
        """Returns the report of this task."""
        waited, first, where = activity.waited(), activity.is_first, activity.where
        if not waited:
            phase = stacks.activity()
            return cls(phase, phase == "building", stacks.place(), activity.steps)
        if where == "step" and _read_briefly(activity.fetching):
            return cls("data", first, stacks.data_place(), activity.steps, waited)
        return cls(where, first, stacks.place(), activity.steps, waited)


def awaited_tasks(reports: Mapping[str, Report], asker: str, limit: float) -> dict[str, str]:
    """Returns the tasks that the others wait for, each with its activity in words; empty if no task hangs, or not yet.

    Args:
        reports: The reports of all tasks.
        asker: The task that has waited longer than the limit.
        limit: The limit of a step that is not a first execution, in seconds.
    """
    waits = reports[asker]
    patient = waits.waited < FIRST * limit
    named: dict[str, str] = {}
    for task, report in reports.items():
        at = f" at {report.place}" if report.place else ""
        if report.phase == "silent":
            named[task] = "does not answer: is it stopped, or is its host gone?"
        elif report.first and patient:
            continue
        elif report.phase == "user" and task != asker:
            named[task] = f"is{at}" if at else "is outside of a step"
        elif report.phase == "data":
            named[task] = f"waits for its data{at}" if at else "waits for data in its input pipeline"
        elif report.first:
            named[task] = f"is in its first step{at}"
    if named:
        return named
    stuck = {
        task: report
        for task, report in reports.items()
        if report.phase in ("step", "exchange") and report.waited > limit / 2 and not report.first
    }
    if len(stuck) < len(reports):
        return {}  # another task saves, evaluates, compiles, or has continued
    last = max((report.step, report.phase == "step") for report in stuck.values())
    behind = {
        task: f"waits in another collective at {report.place}"
        for task, report in stuck.items()
        if (report.step, report.phase == "step") < last
    }
    if behind or patient:
        return behind
    return {task: f"waits in step {report.step}" for task, report in stuck.items()}


class HangWatch:
    """Thread that answers other tasks, and asks them if this task has waited longer than the limit. It runs until the process ends.

    Args:
        cluster: The cluster.
        task: This process's task.
        timeout_seconds: The limit; 0 is off, None deduces it.
        waits: This process's waits.
    """

    def __init__(self, cluster: ClusterSpec, task: TaskSpec, timeout_seconds: float | None, waits: Activity = activity):
        self._cluster, self._task, self._fixed, self._waits = cluster, task, timeout_seconds, waits
        self._others = [other for other in cluster.training_tasks() if other != task]
        self._number, self._asked_at, self._asked_since = 0, 0.0, 0.0
        self._over = threading.Event()

    @property
    def is_late(self) -> bool:
        """Returns whether this task has waited longer than the limit."""
        return self._waits.waited() > self._waits.limit(self._fixed)

    def start(self) -> None:
        """Starts the thread."""
        self._waits.watched = True
        thread = threading.Thread(target=self._run, daemon=True, name="tfdist-hangs")
        thread.start()

        def stop() -> None:  # before TensorFlow's shutdown
            self._over.set()
            thread.join(_LOOK_EVERY)

        atexit.register(stop)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            stacks.answer_request()
            with contextlib.suppress(tf.errors.OpError):
                self._answer(json.loads(tf_cluster.published(self._key(), 0.01)))
                continue
            if self._is_due():
                self._ask()

    def _is_due(self) -> bool:
        waited, limit = self._waits.waited(), self._waits.limit(self._fixed)
        if waited <= limit or not self._others:
            return False
        if self._asked_since != self._waits.since:  # another wait than the last one that was asked about
            return True
        return time.monotonic() - self._asked_at > limit

    def _ask(self) -> None:
        self._asked_since = self._waits.since
        request = {"asker": str(self._task), "waited": self._waits.waited()}
        with contextlib.suppress(tf.errors.OpError):  # another task may have asked first
            tf_cluster.publish(self._key(), json.dumps(request))
        try:
            self._answer(json.loads(tf_cluster.published(self._key(), _ANSWER_WITHIN)))
        except tf.errors.OpError:  # the chief holds the published texts
            chief = self._cluster.chief
            if chief != self._task and reachability.unreachable_tasks(self._cluster, [chief], serving=True):
                own = Report.of_this_task()
                reports = {str(self._task): own, str(chief): Report("silent")}
                self._end(*self._message(awaited_tasks(reports, str(self._task), self._base()), own))
        self._asked_at = time.monotonic()

    def _answer(self, request: dict[str, Any]) -> None:
        own = Report.of_this_task()
        asker, waited = request["asker"], request["waited"]
        stacks.dump(f"{asker} has waited {waited:.0f} s for other tasks")
        with contextlib.suppress(tf.errors.OpError):
            tf_cluster.publish(self._key(str(self._task)), json.dumps(dataclasses.asdict(own)))
        if asker == str(self._task):
            message, named = self._decide(own)
            with contextlib.suppress(tf.errors.OpError):
                tf_cluster.publish(self._key("verdict"), json.dumps([message, named]) if named else _WAITS_ON)
        else:
            message, named = self._verdict()
            self._asked_since, self._asked_at = self._waits.since, time.monotonic()
        self._number += 1
        if named:
            self._end(message, named)

    def _verdict(self) -> tuple[str, list[str]]:
        ends = time.monotonic() + _VERDICT_WITHIN
        while time.monotonic() < ends and not self._over.is_set():
            try:
                text = tf_cluster.published(self._key("verdict"), _LOOK_EVERY)
            except tf.errors.DeadlineExceededError:
                continue
            except tf.errors.OpError:
                break
            message, named = json.loads(text) if text != _WAITS_ON else ("", [])
            return message, named
        return "", []

    def _decide(self, own: Report) -> tuple[str, list[str]]:
        since = self._waits.since
        reports = {str(self._task): own, **self._reports()}
        named = awaited_tasks(reports, str(self._task), self._base())
        if self._waits.since != since:  # the wait has ended meanwhile
            return "", []
        return self._message(named, dataclasses.replace(own, waited=self._waits.waited()))

    def _base(self) -> float:
        return self._waits.limit(self._fixed) / (FIRST if self._waits.is_first else 1)

    def _message(self, named: Mapping[str, str], own: Report) -> tuple[str, list[str]]:
        if not named:
            return "", []
        where = f"step {own.step}" if own.phase in ("step", "data") else f"an exchange after step {own.step}"
        what = "; ".join(f"{task} {text}" for task, text in named.items())
        who, whom = str(self._task), "for it " if len(named) == 1 else "for them "
        if who in named:
            who, whom = "it" if len(named) == 1 else who, ""
        return (
            f"{what}; {who} has waited {own.waited:.0f} s {whom}in {where}, "
            f"{HANG}{self._waits.limit(self._fixed):.0f} s ({self._waits.reason(self._fixed)}). {_REMEDY}"
        ), list(named)

    def _reports(self) -> dict[str, Report]:
        """Returns the other tasks' reports."""
        reports: dict[str, Report] = {}
        ends = time.monotonic() + _ANSWER_WITHIN
        missing = self._collect(self._others, reports, ends)
        absent = reachability.unreachable_tasks(self._cluster, missing, serving=True) if missing else {}
        late = self._collect(
            [task for task in missing if task not in absent], reports, time.monotonic() + _LATE_ANSWER_WITHIN
        )
        # The watch for lost workers reports them.
        gone = [task for task in absent if absent[task] in reachability.ENDED]
        return reports | {str(task): Report("silent") for task in [*absent, *late] if task not in gone}

    def _collect(self, tasks: list[TaskSpec], reports: dict[str, Report], ends: float) -> list[TaskSpec]:
        missing = []
        for task in tasks:
            try:
                text = tf_cluster.published(self._key(str(task)), max(ends - time.monotonic(), 0.01))
                reports[str(task)] = Report(**json.loads(text))
            except tf.errors.OpError:
                missing.append(task)
        return missing

    def _end(self, message: str, named: list[str]) -> None:
        """Aborts this task's collectives. If the task is named and has not ended after 10 s, ends its process."""
        if not named or self._over.is_set():
            return
        calls.abort_collectives(tf.errors.UNAVAILABLE, f"{REASON_PREFIX}{message}")
        if str(self._task) in named and not self._waits.since:
            logger.error(message)
        if str(self._task) in named and not self._over.wait(_END_AFTER):
            process_end.end(1)
        self._over.set()

    def _key(self, part: str = "") -> str:
        return f"tfdist/hang/{self._number}/{part}" if part else f"tfdist/hang/{self._number}"


def start_watch(cluster: ClusterSpec, task: TaskSpec, timeout_seconds: float | None) -> None:
    """Starts the watch of this process, once."""
    global _watch
    if _watch is None:
        _watch = HangWatch(cluster, task, timeout_seconds)
        _watch.start()


def is_late() -> bool:
    """Returns whether this task has waited longer than the limit."""
    return _watch is not None and _watch.is_late


def _read_briefly(read: Callable[[], bool]) -> bool:
    """Returns the result of a function, or False if it takes over a second or raises an error."""
    results: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run() -> None:
        with contextlib.suppress(Exception):
            results.put(read())

    threading.Thread(target=run, daemon=True, name="tfdist-read").start()
    with contextlib.suppress(queue.Empty):
        return results.get(timeout=_READ_WITHIN)
    return False
