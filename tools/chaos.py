"""Kills, stops or ends tasks of a job at given steps, to see how the job survives.

    python -m tools.chaos "kill:worker:1@120, stop:worker:0@200+10s, term:worker:0@30s" -- tfdist launch --workers=2 -- python script.py

`kill` sends SIGKILL, `term` SIGTERM, and `stop` SIGSTOP and, after its seconds, SIGCONT. `@120` means after 120 training steps, and `@30s`
30 seconds after the start. `launcher` in place of a task means the command. Each event happens once, also if a restart repeats its step.
The exit code is that of the command, whose messages tell the outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil

from tfdist.runtime import progress

LAUNCHER = "launcher"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_EVENT = re.compile(r"(kill|term|stop):([a-z]+(?::\d+)?)@(\d+)(s?)(?:\+(\d+)s)?")
_LOOK_EVERY = 0.02  # seconds


@dataclasses.dataclass
class Event:
    """A fault of a task.

    Attributes:
        text: The event as given.
        what: `kill`, `stop` or `term`.
        victim: The task, as `worker:1`, or `launcher`.
        at: The step, or the seconds after the start.
        is_time: Whether `at` is a time.
        seconds: The duration of a stop.
        happened_at: The time at which it happened, or None.
    """

    text: str
    what: str
    victim: str
    at: int
    is_time: bool
    seconds: int
    happened_at: float | None = None


def parse(text: str) -> list[Event]:
    """Returns the events of a text. Raises ValueError for an invalid one."""
    events = []
    for part in map(str.strip, text.split(",")):
        match = _EVENT.fullmatch(part)
        if match is None or (match[1] == "stop") != bool(match[5]):
            raise ValueError(f"an event is kill:TASK@STEP, term:TASK@STEP or stop:TASK@STEP+10s. Received: {part!r}.")
        events.append(Event(part, match[1], match[2], int(match[3]), bool(match[4]), int(match[5] or 0)))
    return events


def tasks(launcher: int) -> Iterator[tuple[str, int, int]]:
    """Yields the name, the process id and the step of each task that a launcher has started."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error, KeyError, ValueError, OSError):
                environ = process.environ()
                task = json.loads(environ["TF_CONFIG"])["task"]
                if os.getsid(process.pid) == process.pid:  # not a process that the task has started
                    steps = progress.read(environ[progress.FOLDER], f"{task['type']}-{task['index']}")
                    yield f"{task['type']}:{task['index']}", process.pid, steps.done if steps else 0


def run(events: Sequence[Event], command: Sequence[str]) -> int:
    """Runs a command, and causes the events in its tasks; returns its exit code."""
    launcher = subprocess.Popen(command)
    started, stopped = time.monotonic(), list[tuple[float, str, int]]()
    while launcher.poll() is None:
        time.sleep(_LOOK_EVERY)
        now = time.monotonic()
        for resumes, name, pid in [each for each in stopped if each[0] <= now]:
            stopped.remove((resumes, name, pid))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGCONT)
            print(f"chaos: {name} continues", flush=True)
        waiting = [event for event in events if event.happened_at is None]
        found = {name: (pid, step) for name, pid, step in tasks(launcher.pid)} if waiting else {}
        done = max((step for _, step in found.values()), default=0)
        for event in waiting:
            if (now - started if event.is_time else done) < event.at or event.victim not in (*found, LAUNCHER):
                continue
            event.happened_at = now
            # A task is the leader of its group, in which the processes that it has started are, too.
            send = launcher.send_signal
            if event.victim != LAUNCHER:
                pid, _ = found.pop(event.victim)
                send = functools.partial(os.killpg, pid)
                if event.what == "stop":
                    stopped.append((now + event.seconds, event.victim, pid))
            with contextlib.suppress(ProcessLookupError):
                send(SIGNALS[event.what])
            print(f"chaos: {event.text} happened at step {done}", flush=True)
    for event in events:
        if event.happened_at is None:
            print(f"chaos: {event.text} never happened", flush=True)
    return launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode


def main(argv: Sequence[str]) -> int:
    """Runs the tool; returns the exit code of the command, or 2 for an invalid command line."""
    try:
        text, dashes, *command = argv
        if dashes != "--" or not command:
            raise ValueError("the command is missing")
        events = parse(text)
    except ValueError as e:
        print(f"{e}\n\n{__doc__}", file=sys.stderr)
        return 2
    return run(events, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
