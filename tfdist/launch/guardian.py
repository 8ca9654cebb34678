"""`Guardian`: a process that kills the launcher's tasks and removes its folder if the launcher dies. No TensorFlow here."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

from tfdist.runtime.report import progress

# Reads commands from a pipe: "?" announces a start, "!" its failure, "+N" and "-N" add and remove a process group. The kernel
# closes the pipe however the launcher dies, kill -9 included: then the guardian kills the remaining groups and removes the folder.
# It uses the standard library alone, so that it starts at once.
_PROGRAM = """
import os, shutil, signal, sys, time
folder, mark = sys.argv[1], os.fsencode(sys.argv[2])
if sys.argv[3:] and os.fork():
    os._exit(0)
def marked():
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\\0") and os.getpgid(int(name)) == int(name):
                    yield int(name)
        except OSError:
            pass
groups, starting = set(), False
# If the last line is "?", the launcher died between a task's start and the report of its group.
for line in sys.stdin:
    starting = line[0] == "?"
    if line[0] in "+-":
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
if starting:
    # The task shows the mark in /proc only after its exec, which may come later than the launcher's death.
    limit = time.monotonic() + 5
    while groups.issuperset(leaders := set(marked())) and time.monotonic() < limit:
        time.sleep(0.05)
    groups |= leaders
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
# A killed process may still finish a write and so create a file while the folder is removed.
for _ in range(100):
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        break
    time.sleep(0.1)
"""


class Guardian:
    """Helper process that kills the tasks if the launcher dies; a context manager.

    Args:
        folder: The folder that the guardian removes at the end; an absolute path.
        is_child: Whether the guardian stays a child of this process, which then waits for it. A Ray worker kills its children at its end.
    """

    def __init__(self, folder: str, is_child: bool = True):
        self._folder = folder
        self._words = [] if is_child else ["detached"]

    def __enter__(self) -> Guardian:
        self._process = subprocess.Popen(
            [sys.executable, "-SEc", _PROGRAM, self._folder, f"{progress.FOLDER}={self._folder}", *self._words],
            bufsize=0,  # so that no buffered write can fail later if the guardian has been killed
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C and `kill -- -GROUP` end the launcher's group, and must not end the guardian
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Announces that the block starts a process group. The launcher may be killed before it can report the group's id."""
        self._send("?")
        try:
            yield
        except BaseException:
            self._send("!")
            raise

    def watch(self, group: int) -> None:
        """Adds a process group to those that the guardian kills if the launcher dies."""
        self._send(f"+{group}")

    def unwatch(self, group: int) -> None:
        """Removes a process group, which has ended, from those that the guardian kills."""
        self._send(f"-{group}")

    def _send(self, message: str) -> None:
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(f"{message}\n".encode())
        except BrokenPipeError:  # the guardian has been killed; this process still ends its tasks itself
            pass
