"""A launcher in a process of its own, for tests: started on small scripts, watched, searched for left-over processes."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence

PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
TASK = json.loads(os.environ["TF_CONFIG"])["task"]
def await_file(name):
    while not (pathlib.Path(name).exists() and pathlib.Path(name).stat().st_size):
        time.sleep(0.01)
def say(text):  # in one write: `print` writes a line and its end apart, and a task may be killed between them
    os.write(1, text.encode() + b"\\n")
def sleep_for_ever():
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
"""


def imported(module: str) -> str:
    """Returns the line of a script that imports a module of tfdist. For the statement `import`, a launcher has TensorFlow imported."""
    return f"{module.rpartition('.')[2]} = __import__('importlib').import_module({module!r})\n"


PROGRESS = imported("tfdist.runtime.report.progress")


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.02)


class Job:
    """A launcher in a process of its own, whose processes all carry a marker in their command lines."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.marker = f"marker-{uuid.uuid4().hex}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, script: str | Sequence[str], *flags: str, stdout: int | None = None, before: str = ""
    ) -> subprocess.Popen[bytes]:
        """Starts the launcher on a Python script, or on a command; `before` is what its process does first, such as longer waits."""
        (self.folder / "script.py").write_text(PRELUDE + script if isinstance(script, str) else "")
        command = [sys.executable, "script.py", self.marker] if isinstance(script, str) else [*script]
        launcher = ["-m", "tfdist.launch"]
        if before:
            run = "import runpy; runpy.run_module('tfdist.launch', run_name='__main__', alter_sys=True)"
            launcher = ["-c", f"{before}\n{run}"]
        with (self.folder / "out").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *flags, "--", *command],
                cwd=self.folder,
                stdout=out if stdout is None else stdout,
                stderr=subprocess.STDOUT,
            )
        return self.process

    def run(self, script: str | Sequence[str], *flags: str) -> int:
        return self.start(script, *flags).wait(timeout=150)

    def output(self) -> str:
        return (self.folder / "out").read_bytes().decode()

    def log(self, task: str) -> str:
        return (self.folder / "logs" / f"{task}.log").read_bytes().decode()

    def alive(self) -> list[int]:
        """Returns the ids of the processes with the marker, the launcher included."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if self.marker.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:  # it has just ended
                pass
        return found
