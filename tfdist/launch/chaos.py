"""Faults that the launcher causes in its own job on request, as `--chaos="kill:worker:1@120"`, and their outcome. No TensorFlow here."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.errors import ConfigError, format_value, unknown_name_message
from tfdist.launch.output import LauncherOutput
from tfdist.launch.process import TaskProcess
from tfdist.runtime import progress

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_DONE = {"kill": "killed", "stop": "stopped", "term": "sent SIGTERM to"}
_RANDOM = "random"
_LAUNCHER = "launcher"
_SECONDS = re.compile(r"\d{1,9}(?:\.\d{1,9})?s")
_STEP = re.compile(r"\d{1,15}")
_MOST_DRAWN, _LONGEST_DRAWN_STOP = 3, 5  # events; seconds
# Seconds between two looks at the tasks. Short while an event is due, so that it happens at its step or a few steps later.
_TURN, _TURN_WITH_EVENTS = 0.05, 0.005
_OUTPUT_SECONDS = 5.0  # limit of the wait for the reader of the message before the launcher kills itself


@dataclasses.dataclass
class Event:
    """A fault of one task or of the launcher, and its outcome.

    Args:
        what: `kill`, `stop` or `term`.
        victim: The task, as `worker:1`, or `launcher`.
        step: The number of training steps after which the event happens. None means a time.
        after: The time of the event, in seconds after the start of the job, if `step` is None.
        seconds: The duration of a stop.

    Attributes:
        happened_at: The time at which the event happened, by `time.monotonic()`, or None.
        happened_in: The process to which it happened; None for the launcher.
        happened_step: The job's step at that time; None before the first report.
        beside: All processes of that time.
        is_replaced: Whether the task has had a new process since then, or, in a job of another size, all other tasks have.
        until: The time of the second part, by `time.monotonic()`: a stopped task continues, or the launcher kills itself. None if there is none.
        reached: The last step before the interruption; None before the first report.
        begin: The step from which the job has trained on, or None.
        trained_after: The seconds from the event to the next new step, or None.
    """

    what: str
    victim: str
    step: int | None = None
    after: float = 0.0
    seconds: float = 0.0
    happened_at: float | None = None
    happened_in: TaskProcess | None = None
    beside: Sequence[TaskProcess] = ()
    happened_step: int | None = None
    is_replaced: bool = False
    until: float | None = None
    reached: int | None = None
    begin: int | None = None
    trained_after: float | None = None

    def __str__(self) -> str:
        when = f"{self.after:g}s" if self.step is None else self.step
        return f"{self.what}:{self.victim}@{when}" + (f"+{self.seconds:g}s" if self.seconds else "")

    @property
    def is_settled(self) -> bool:
        """Returns whether the event has happened and the job has trained on."""
        return self.trained_after is not None and self.until is None


class Chaos:
    """The events of one job. Each happens at most once, also if a restart repeats its step.

    Args:
        events: The events of this launcher's tasks.
        seeds: The seeds from which further events are drawn once the number of steps of the training is known.
        cluster: All tasks of the job. None means that there are no events.
        here: The tasks of this launcher. None means all.

    Examples:
        >>> from tfdist.cluster import local_cluster
        >>> from tfdist.launch import chaos
        >>> events = chaos.parse("kill:worker:1@120, stop:worker:0@30s+10s", local_cluster(workers=2))
    """

    def __init__(
        self,
        events: Sequence[Event] = (),
        seeds: Sequence[int] = (),
        cluster: ClusterSpec | None = None,
        here: Sequence[TaskSpec] | None = None,
    ):
        self._events, self._seeds = list(events), list(seeds)
        self._all = cluster.tasks() if cluster else []
        self._here = self._all if here is None else list(here)
        self._restarts_workers_alone = bool(cluster and cluster.jobs.get("ps"))
        self._started: float | None = None
        self._resumed_from: int | None = None  # None before the first report
        self._done: int | None = None  # the last known step

    @property
    def turn(self) -> float:
        """Seconds until the next `look`."""
        is_over = not self._seeds and all(event.is_settled for event in self._events)
        return _TURN if is_over else _TURN_WITH_EVENTS

    def look(self, running: Sequence[TaskProcess], folder: str, output: LauncherOutput) -> None:
        """Causes the events that are due, and records how the job continues after earlier ones. Call it every `turn` seconds.

        Args:
            running: The running tasks.
            folder: The folder in which the tasks write their progress.
            output: The launcher's output, for messages.
        """
        if not self._events and not self._seeds:
            return
        now = time.monotonic()
        self._started = self._started or now
        now_at = self._read(folder)
        if self._seeds and now_at and now_at.total:
            self._draw(now_at.total, output)
        processes = {str(task.spec): task for task in running}
        for event in self._events:
            if event.happened_at is None:
                done = now_at and now_at.done
                if self._is_due(event, done, now) and (event.victim == _LAUNCHER or self._is_hit(event, processes)):
                    event.beside = tuple(running)
                    self._cause(event, processes.get(event.victim), done, output)
                continue
            if event.until is not None:
                self._end_if_due(event, processes.get(event.victim), output)
            self._follow(event, processes.get(event.victim), now_at, running)

    def report(self, exit_code: int, folder: str, output: LauncherOutput) -> None:
        """Prints the outcome of each event.

        Args:
            exit_code: The job's exit code.
            folder: As for `look`.
            output: The launcher's output.
        """
        for seed in self._seeds:
            output.say(
                f"chaos: {_RANDOM}:{seed} drew no event: the training reported no total number of steps to this launcher. "
                "Name the events, as kill:worker:0@120"
            )
        last = self._read(folder) if self._events else None  # a task may have trained and ended since the last look
        for event in self._events:
            if event.happened_at is not None:
                self._follow(event, None, last, ())
            output.say(f"chaos: {event} {self._outcome(event, exit_code)}")

    def _read(self, folder: str) -> progress.Steps | None:
        """Returns the progress of the task that has trained the most steps; None before the first report."""
        now_at = max((steps for task in self._here if (steps := progress.read(folder, task.name))), default=None)
        if now_at:
            self._done = now_at.done
            if self._resumed_from is None:
                self._resumed_from = _begin(now_at)
        return now_at

    def _draw(self, total: int, output: LauncherOutput) -> None:
        """Draws the events of the seeds. Launchers of the same job draw the same events."""
        names = [str(task) for task in self._here]
        for seed in self._seeds:
            drawn = draw(seed, [str(task) for task in self._all], total)
            output.say(f'chaos: {_RANDOM}:{seed} is --chaos="{", ".join(map(str, drawn))}"')
            self._events += [event for event in drawn if event.victim in names]
        self._seeds = []

    def _is_due(self, event: Event, done: int | None, now: float) -> bool:
        if event.step is None:
            return self._started is not None and now - self._started >= event.after
        return done is not None and done >= event.step and not self._is_passed(event)

    def _is_passed(self, event: Event) -> bool:
        """Returns whether the event's step was trained before this job, which has resumed from a backup."""
        return event.step is not None and event.step <= (self._resumed_from or -1)

    def _is_hit(self, event: Event, processes: dict[str, TaskProcess]) -> bool:
        """Returns whether the event's task runs, and has not been killed just now by another event."""
        process = processes.get(event.victim)
        if process is None or process.process.poll() is not None:
            return False
        return not any(other.happened_in is process and other.what == "kill" for other in self._events)

    def _cause(self, event: Event, process: TaskProcess | None, done: int | None, output: LauncherOutput) -> None:
        event.happened_at, event.happened_in = time.monotonic(), process
        event.happened_step = event.reached = done
        number = _SIGNALS[event.what]
        if process is not None:
            process.signal(number)
            if event.what == "stop":
                event.until = event.happened_at + event.seconds
        elif event.what == "kill":
            event.until = event.happened_at + _OUTPUT_SECONDS
        else:
            os.kill(os.getpid(), number)
        for_seconds = f" for {event.seconds:g} s" if event.seconds else ""
        output.say(f"chaos: {_DONE[event.what]} {event.victim}{for_seconds} {_where(event)}")

    def _end_if_due(self, event: Event, process: TaskProcess | None, output: LauncherOutput) -> None:
        is_due = event.until is not None and time.monotonic() >= event.until
        if event.happened_in is None:
            if is_due or output.is_written:
                os.kill(os.getpid(), signal.SIGKILL)
        elif is_due:
            event.until = None
            if process is event.happened_in:
                process.signal(signal.SIGCONT)
                output.say(f"chaos: {event.victim} continues")

    def _follow(
        self,
        event: Event,
        process: TaskProcess | None,
        now_at: progress.Steps | None,
        running: Sequence[TaskProcess],
    ) -> None:
        """Records the first new step after an event.

        A step that was complete when the event happened may be reported later. So steps count once the task can train again: as a new
        process, or after its stop. Under parameter servers the job does not wait for a worker.
        """
        waits_for_victim = not (self._restarts_workers_alone and event.victim.startswith("worker:"))
        event.is_replaced |= process is not None and process is not event.happened_in
        event.is_replaced |= bool(running) and not any(each in event.beside for each in running)
        has_continued = event.what == "stop" and event.until is None
        if event.trained_after is not None or now_at is None:
            return
        if waits_for_victim and not event.is_replaced and not has_continued:
            event.reached = max(event.reached or 0, now_at.done)
            return
        if event.begin is None or now_at.done < event.begin:
            event.begin = _begin(now_at) if waits_for_victim and event.is_replaced else now_at.done
        if now_at.done > event.begin:
            event.trained_after = time.monotonic() - (event.happened_at or 0.0)

    def _outcome(self, event: Event, exit_code: int) -> str:
        if event.happened_at is None:
            return f"never happened: {self._why_never(event)}"
        happened = f"happened {_where(event)}; "
        if event.trained_after is None:
            without = "" if exit_code else ", without another step"
            return f"{happened}the job ended with exit code {exit_code}{without}"
        repeated = max((event.reached or 0) - (event.begin or 0), 0)
        count = f" ({repeated} {'step' if repeated == 1 else 'steps'} repeated)" if repeated else ""
        return f"{happened}{event.trained_after:.1f} s later the job trained on, from step {event.begin}{count}"

    def _why_never(self, event: Event) -> str:
        if self._is_passed(event):
            return f"the training continued from step {self._resumed_from}"
        now = time.monotonic()
        if self._is_due(event, self._done, now):
            return f"{event.victim} did not run at that time"
        if event.step is None:
            return f"the job ended after {now - (self._started or now):.1f} s"
        return "the job ended before its first step" if self._done is None else f"the job ended at step {self._done}"


def _begin(steps: progress.Steps) -> int:
    """Returns the step from which a task has begun, by its first report: the task may have trained steps since."""
    return min(steps.done, steps.saved)


def _where(event: Event) -> str:
    return "before the first step" if event.happened_step is None else f"at step {event.happened_step}"


def draw(seed: int, tasks: Sequence[str], total: int) -> list[Event]:
    """Returns one to three events, ordered by step. The arguments determine them.

    Args:
        seed: The seed.
        tasks: The names of the tasks that they may happen to.
        total: The number of steps of the training.
    """
    chance = random.Random(seed)
    drawn = []
    for _ in range(chance.randint(1, _MOST_DRAWN)):
        what, task = chance.choice(sorted(_SIGNALS)), chance.choice(tasks)
        step, seconds = chance.randint(1, max(total - 1, 1)), chance.randint(1, _LONGEST_DRAWN_STOP)
        drawn.append(Event(what, task, step, seconds=seconds if what == "stop" else 0))
    return sorted(drawn, key=lambda event: event.step or 0)


def parse(text: str, cluster: ClusterSpec, here: Sequence[TaskSpec] | None = None) -> Chaos:
    """Returns the events that a text names.

    Args:
        text: Events, separated by commas: `kill:TASK@STEP`, `term:TASK@STEP`, `stop:TASK@STEP+10s` or `random:SEED`. `@30s` instead of
            `@STEP` means 30 s after the start. `TASK` may be `launcher`, except for `stop`.
        cluster: All tasks of the job.
        here: The tasks of this launcher; events of other tasks are left to their launchers. None means all.

    Raises:
        ConfigError: The text is invalid; the error lists every problem.
    """
    faults: list[str] = []
    events, seeds = [], []
    known = [str(task) for task in cluster.tasks()]
    own = known if here is None else [str(task) for task in here]
    knows_steps = not cluster.jobs.get("ps") or str(cluster.chief) in own
    for part in map(str.strip, text.split(",") if text.strip() else []):
        found = [*_faults(part, known)]
        what, _, rest = part.partition(":")
        victim, _, when_and_length = rest.partition("@")
        when, _, length = when_and_length.partition("+")
        has_step = what == _RANDOM or not when.endswith("s")
        if not found and has_step and not knows_steps and (what == _RANDOM or victim in (*own, _LAUNCHER)):
            found = [
                f"{format_value(part)}: the chief runs on another host, and only its launcher knows the steps; use a time, as {what}:"
                f"{victim}@30s, or leave it out here."
            ]
        faults += [f"--chaos: {fault}" for fault in found]
        if found:
            continue
        if what == _RANDOM:
            seeds.append(int(rest))
        elif victim in (*own, _LAUNCHER):
            step, after = (int(when), 0.0) if has_step else (None, float(when[:-1]))
            events.append(Event(what, victim, step, after, float(length[:-1] or 0) if length else 0.0))
    if faults:
        raise ConfigError(faults)
    return Chaos(events, seeds, cluster, here)


def _faults(part: str, known: Sequence[str]) -> Iterator[str]:
    """Yields the errors in the text of one event; `known` are the names of the tasks."""
    what, _, rest = part.partition(":")
    shown = format_value(part)
    if what == _RANDOM:
        if not _STEP.fullmatch(rest):
            yield f"{shown}: the seed must be a whole number, as {_RANDOM}:7."
        return
    if what not in _SIGNALS:
        yield f"{shown}: {unknown_name_message('event', what, [*_SIGNALS, _RANDOM])}"
        return
    victim, _, when_and_length = rest.partition("@")
    when, plus, length = when_and_length.partition("+")
    if victim == _LAUNCHER and what == "stop":
        yield f"{shown}: a stopped launcher could not continue; use kill:{_LAUNCHER} or term:{_LAUNCHER}, or stop a task."
    elif victim != _LAUNCHER and victim not in known:
        yield f"{shown}: {unknown_name_message('task', victim, [*known, _LAUNCHER])}"
    if not _STEP.fullmatch(when) and not _SECONDS.fullmatch(when):
        yield f"{shown}: the event needs a step, as @120, or a time after the start, as @30s. Received: {format_value(when)}."
    if what == "stop" and not _SECONDS.fullmatch(length):
        yield f"{shown}: a stop needs its duration, as {what}:{victim}@{when or 120}+10s. Received: {format_value(length)}."
    elif what != "stop" and plus:
        yield f"{shown}: only stop has a duration; leave out +{length}."
