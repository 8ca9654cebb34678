"""How faults are done to a job, and undone."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Protocol

from tests.chaos.schedules import Fault
from tests.helpers import two_hosts
from tools import chaos

_CHUNKS = (1 << 16, 1 << 10, 1)
_RATE = ("tbf", "rate", "1mbit", "burst", "4kb", "latency", "400ms")


class Victim(Protocol):
    """The job, as faults see it."""

    folder: pathlib.Path
    hosts: list[tuple[str, str]]

    def find(self, name: str) -> list[int]: ...

    def port(self, task: str) -> int: ...


@contextlib.contextmanager
def happening(fault: Fault, job: Victim) -> Iterator[None]:
    """A fault, which is undone at the end of the context."""
    with contextlib.ExitStack() as undo:
        if fault.what in ("kill", "stop"):
            for pid in job.find(fault.victim):
                chaos.signal_victim(fault.what, pid)
                if fault.what == "stop":
                    undo.callback(chaos.signal_victim, "continue", pid)
        elif fault.what == "unplug":
            space, end = job.hosts[fault.number % 2]
            two_hosts.ip("-n", space, "link", "set", end, "down")
            undo.callback(two_hosts.ip, "-n", space, "link", "set", end, "up")
        elif fault.what == "slow":
            for space, end in job.hosts:
                _tc(space, "add", end, *_RATE)
                undo.callback(_tc, space, "delete", end)
        elif fault.what == "full":
            ballast = job.folder / fault.victim / "ballast"
            _fill(ballast)
            undo.callback(ballast.unlink, missing_ok=True)
        elif fault.what == "steal":
            if fault.phase not in ("before", "between"):  # its own server has the port
                for pid in job.find(fault.victim):
                    chaos.signal_victim("kill", pid)
            undo.enter_context(_steal(job.port(fault.victim)))
        yield


def missing() -> str:
    """Returns why some faults cannot happen here, or an empty text."""
    return two_hosts.missing()


def _tc(space: str, what: str, device: str, *kind: str) -> None:
    subprocess.run(["tc", "-n", space, "qdisc", what, "dev", device, "root", *kind], check=True, capture_output=True)


def _fill(path: pathlib.Path) -> None:
    """Writes a file until not one byte more fits."""
    with path.open("wb", buffering=0) as file:
        for size in _CHUNKS:
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass


@contextlib.contextmanager
def _steal(port: int) -> Iterator[None]:
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for _ in range(200):
            try:
                thief.bind(("", port))
                break
            except OSError:  # the one that had it is still ending, or has been faster: then it keeps it
                time.sleep(0.005)
        else:
            yield
            return
        thief.listen()
        yield
