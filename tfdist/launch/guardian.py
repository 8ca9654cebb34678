"""Kills process groups when the process that watches them has died, in whatever way. No TensorFlow here."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

# Reads process groups to watch from a pipe. At its end, which comes when the launcher is gone, kills what is left of them.
# In a session of its own, to survive what is sent to the launcher's group.
_PROGRAM = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class Guardian:
    """A process of its own that outlives this one long enough; a context manager."""

    def __enter__(self) -> Guardian:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _PROGRAM],
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
