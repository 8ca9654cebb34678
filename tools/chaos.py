"""Kills, stops or ends tasks of a job at given steps, to see how the job survives.

    python -m tools.chaos "kill:worker:1@120, stop:worker:0@200+10s, term:worker:0@30s" -- tfdist launch --workers=2 -- python script.py

`kill` sends SIGKILL, `term` SIGTERM, and `stop` SIGSTOP and, after its seconds, SIGCONT. `@120` means after 120 training steps, and `@30s`
30 seconds after the start. `launcher` in place of a task means the command. Each event happens once, also if a restart repeats its step.
The exit code is that of the command, whose messages tell the outcome. `tests/chaos` finds and signals its tasks by these functions, too.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil

from tfdist.runtime.report import progress

LAUNCHER = "launcher"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT, "term": signal.SIGTERM}
_EVENT = re.compile(r"(kill|term|stop):([a-z]+(?::\d+)?)@(\d+)(s?)(?:\+(\d+)s)?")
_LOOK_EVERY = 0.02  # seconds
_END_SECONDS = 10  # limit of the wait for the end of a killed process


class Event(NamedTuple):
    """A fault of a task.

    Attributes:
        text: The event as given.
        what: `kill`, `stop` or `term`.
        victim: The task, as `worker:1`, or `launcher`.
        at: The step, or the seconds after the start.
        is_time: Whether `at` is a time.
        seconds: The duration of a stop.
    """

    text: str
    what: str
    victim: str
    at: int
    is_time: bool
    seconds: int


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
    try:
        children = psutil.Process(launcher).children(recursive=True)
    except psutil.Error:
        return
    for process in children:
        try:
            environ = process.environ()
            name = process.name()  # of a task that a warm spare has forked
            if "TF_CONFIG" in environ:
                task = json.loads(environ["TF_CONFIG"])["task"]
                name = f"{task['type']}-{task['index']}"
            # Neither a process that the task has started, nor the spare.
            if os.getsid(process.pid) == process.pid and re.fullmatch(r"[a-z]+-\d+", name):
                done = progress.read(environ[progress.FOLDER], name).done
                yield name.replace("-", ":"), process.pid, done
        except (psutil.Error, KeyError, OSError):  # it has just ended, or is another program
            continue


def signal_victim(what: str, pid: int) -> None:
    """Kills, stops, continues or ends a process. Has no effect on a process that has ended, and waits for the end of one that it kills."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # A task leads its group, in which the processes that it has started are, too; a launcher may be in the group of this process.
        send = os.killpg if os.getpgid(pid) == pid else os.kill
        send(pid, _SIGNALS[what])
        if what == "kill":
            select.select([handle], [], [], _END_SECONDS)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def run(events: Sequence[Event], command: Sequence[str]) -> int:
    """Runs a command, and causes the events in its tasks; returns its exit code."""
    launcher = subprocess.Popen(command)
    started = time.monotonic()
    waiting = list(events)
    stopped: list[tuple[float, str, int]] = []
    while launcher.poll() is None:
        time.sleep(_LOOK_EVERY)
        now = time.monotonic()
        for resumes, name, pid in [each for each in stopped if each[0] <= now]:
            stopped.remove((resumes, name, pid))
            signal_victim("continue", pid)
            print(f"chaos: {name} continues", flush=True)
        if not waiting:
            continue
        found = {name: (pid, step) for name, pid, step in tasks(launcher.pid)}
        done = max((step for _, step in found.values()), default=0)
        found[LAUNCHER] = launcher.pid, 0
        for event in list(waiting):
            reached = now - started if event.is_time else done
            if reached < event.at or event.victim not in found:
                continue
            waiting.remove(event)
            pid, _ = found.pop(event.victim)
            signal_victim(event.what, pid)
            if event.what == "stop":
                stopped.append((now + event.seconds, event.victim, pid))
            print(f"chaos: {event.text} happened at step {done}", flush=True)
    for event in waiting:
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
