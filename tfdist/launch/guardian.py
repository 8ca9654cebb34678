"""Ends what the launcher has started and removes its folder when it has died, in whatever way. No TensorFlow here."""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType

from tfdist.runtime import progress

# Reads process groups to watch from a pipe. At its end, which comes when the launcher is gone, kills what is left of them,
# and removes the folder, in which a process that is being killed may still write.
# In a session of its own, to survive what is sent to the launcher's group. A launcher that is killed while it starts a task has
# announced that, and not told its number yet: the task is then found by the mark in its environment.
_PROGRAM = """
import os, shutil, signal, sys, time
folder, mark, launcher = sys.argv[1], os.fsencode(sys.argv[2]), int(sys.argv[3])
def marked():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\\0") and os.getpgid(int(name)) == int(name):
                    yield int(name)
        except OSError:
            pass
groups, announced = set(), False
for line in sys.stdin:
    announced = line[0] == "?"
    if not announced:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
if announced and os.getppid() != launcher:
    time.sleep(0.2)  # it may not have begun its program, with its environment
    groups.update(marked())
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
for _ in range(100):
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        break
    time.sleep(0.1)
"""


class Guardian:
    """A process of its own that outlives this one long enough; a context manager.

    Args:
        folder: What it removes in the end, an absolute path.
    """

    def __init__(self, folder: str):
        self._folder = folder

    def __enter__(self) -> Guardian:
        self._process = subprocess.Popen(
            [sys.executable, "-SEc", _PROGRAM, self._folder, f"{progress.FOLDER}={self._folder}", str(os.getpid())],
            bufsize=0,  # so that nothing is left to write, and to fail, should the guardian have been killed
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)

    def announce(self) -> None:
        """Expects a process group: its number is known only when it runs, and this process may be killed before it tells it."""
        self._tell("?")

    def watch(self, group: int) -> None:
        """Kills this process group at the end."""
        self._tell(f"+{group}")

    def unwatch(self, group: int) -> None:
        """Leaves this process group, which has ended, alone."""
        self._tell(f"-{group}")

    def _tell(self, what: str) -> None:
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(f"{what}\n".encode())
        except BrokenPipeError:  # somebody killed it; this process still ends its tasks itself
            pass
