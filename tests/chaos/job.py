"""A job of real processes under the real launcher, which a schedule's faults happen to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from tests.chaos import faults
from tests.chaos.schedules import FOLDERS, KINDS, LAUNCHER, Fault
from tools import chaos

ROOT = pathlib.Path(__file__).parents[2]
RESTARTS = 3
_MARKER = "CHAOS_JOB"
_DISK = "16m"


class Job:
    """A job, whose processes all carry a marker in their environment.

    Args:
        kind: Its strategy.
        folder: An empty folder for all that it writes.
        hosts: Two namespaces and their ends of the link, or none.
    """

    def __init__(self, kind: str, folder: pathlib.Path, hosts: Sequence[tuple[str, str]] = ()):
        self.kind, self.folder, self.hosts = kind, folder, list(hosts)
        self._mark = f"{_MARKER}={uuid.uuid4().hex}"
        self._launcher: subprocess.Popen[bytes] | None = None
        self.happened: list[Fault] = []
        for name in ("phases", *FOLDERS):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def run(self, schedule: Sequence[Fault], seconds: float) -> tuple[int | None, float]:
        """Runs it once, and lets the faults happen.

        Args:
            schedule: The faults.
            seconds: How long it may take.

        Returns:
            The launcher's exit code, or None if it had not ended in time; and the seconds that it took.
        """
        for path in (self.folder / "phases").iterdir():
            path.unlink()
        count = ["--workers=2", *(["--ps=1"] if self.kind == KINDS[1] else [])]
        launcher = "tools.netlab.launch" if self.hosts else "tfdist.launch"
        spaces = [f"--netns={','.join(space for space, _ in self.hosts)}"] if self.hosts else []
        told = json.dumps([dataclasses.asdict(fault) for fault in schedule])
        command = [sys.executable, "-m", "tests.chaos.training", self.kind, str(self.folder), told]
        own = [f"--max_restarts={RESTARTS}", f"--log_dir={self.folder / 'logs'}"]
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TMPDIR": str(self.folder / "tmp"),
        }
        environ.pop("TF_CONFIG", None)
        environ |= dict([self._mark.split("=")])
        began, over = time.monotonic(), threading.Event()
        with (self.folder / "output").open("ab") as output:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", launcher, *count, *own, *spaces, "--", *command],
                env=environ, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        happening = [
            threading.Thread(target=self._happen, args=(number, fault, over)) for number, fault in enumerate(schedule)
        ]
        for thread in happening:
            thread.start()
        try:
            code: int | None = self._launcher.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        took = time.monotonic() - began
        over.set()
        for thread in happening:
            thread.join()
        return code, took

    def _happen(self, number: int, fault: Fault, over: threading.Event) -> None:
        place = self.folder / "phases" / str(number)
        while not place.with_suffix(".here").exists():
            if over.wait(0.01):
                return
        with faults.happening(fault, self):
            place.with_suffix(".done").touch()
            self.happened.append(fault)
            over.wait(fault.seconds)

    def find(self, name: str) -> list[int]:
        """Returns the process id of the launcher or of a task, once it has started; none if the launcher ends before."""
        launcher = self._launcher
        assert launcher is not None
        if name == LAUNCHER:
            return [launcher.pid]
        found: list[int] = []

        def is_found() -> bool:
            found.extend(pid for task, pid, _ in chaos.tasks(launcher.pid) if task == name)
            return bool(found) or launcher.poll() is not None

        until(is_found, 60)
        return found

    def port(self, task: str) -> int:
        """Returns the port of a task."""
        path = self.folder / "phases" / f"{task}.port"
        until(path.exists, 60)  # it may be the last one to start
        return int(path.read_text())

    def output(self) -> str:
        """Returns what the launcher has shown."""
        return (self.folder / "output").read_bytes().decode(errors="replace")

    def alive(self) -> list[int]:
        """Returns the ids of the job's processes."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has just ended
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def taken_ports(self) -> list[int]:
        """Returns the ports of its tasks at which somebody listens."""
        return [port for path in (self.folder / "phases").glob("*.port") if not _is_free(port := self.port(path.stem))]

    def end(self) -> None:
        """Kills what is left of it."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._launcher:
            self._launcher.wait(30)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[None]:
    """A file system of its own, which is soon full."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Waits for a condition; returns whether it was met in time."""
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
