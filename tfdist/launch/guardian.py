"""Ends what the launcher has started and removes its folder when it has died, in whatever way. No TensorFlow here."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

# Reads process groups to watch from a pipe. At its end, which comes when the launcher is gone, kills what is left of them,
# and removes the folder, in which a process that is being killed may still write.
# In a session of its own, to survive what is sent to the launcher's group.
_PROGRAM = """
import os, shutil, signal, sys, time
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.lexists(sys.argv[1]):
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
            [sys.executable, "-S", "-E", "-c", _PROGRAM, self._folder],
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

    def watch(self, group: int) -> None:
        """Kills this process group at the end."""
        self._tell("+", group)

    def unwatch(self, group: int) -> None:
        """Leaves this process group, which has ended, alone."""
        self._tell("-", group)

    def _tell(self, sign: str, group: int) -> None:
        pipe = self._process.stdin
        try:
            if pipe is not None:
                pipe.write(f"{sign}{group}\n".encode())
        except BrokenPipeError:  # somebody killed it; this process still ends its tasks itself
            pass
