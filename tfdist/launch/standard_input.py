"""`StandardInput`: the launcher's standard input, which one of its tasks may read. No TensorFlow here."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from tfdist.cluster import TaskSpec

_MOST = 16  # chunks at a time, so that an endless input leaves time for the tasks' output


class StandardInput:
    """The standard input of the launcher, which at most one task reads, from a pipe.

    The task does not read the terminal itself: in the background it would take the lines that are meant for the shell, and
    debuggers change a terminal so that Ctrl-C no longer reaches the launcher.

    Args:
        task: The task. If it restarts, it continues after the lines that it has read before. None means that no task reads.
    """

    def __init__(self, task: TaskSpec | None = None):
        self._task = task
        self._pipe = -1
        self._writer = -1
        if task:
            self._pipe, self._writer = os.pipe()
        self._source = -1 if sys.stdin is None else 0  # it is None if it was closed before the start

    @property
    def is_read(self) -> bool:
        """Whether a task reads it."""
        return self._task is not None

    def of(self, task: TaskSpec) -> int:
        """Returns the descriptor for a task's standard input, or `subprocess.DEVNULL`."""
        return self._pipe if task == self._task else subprocess.DEVNULL

    def is_typed_for(self, task: TaskSpec) -> bool:
        """Returns whether a task reads what a person types."""
        return task == self._task and os.isatty(self._source)

    def remedy(self, task: TaskSpec) -> str:
        """Returns the remedy after a task got no answer; empty for the task that reads."""
        if task == self._task:
            return ""
        return f'. Tasks have no terminal: run python script.py, or Trainer("mirrored", devices=2), or tfdist launch --stdin={task} ...'

    def forward(self) -> None:
        """Passes on the input that is there, as far as the pipe has room for it. Never waits."""
        for _ in range(_MOST):
            if self._writer < 0 or not self._is_ready():
                return
            try:
                chunk = os.read(self._source, select.PIPE_BUF)  # as much as a pipe that is ready always takes
            except OSError:  # closed, or a terminal that was hung up
                chunk = b""
            if chunk:
                os.write(self._writer, chunk)
            else:  # the task reads the end of its input, too
                os.close(self._writer)
                self._writer = -1

    def _is_ready(self) -> bool:
        if self._source < 0:
            return True
        readable, writable, _ = select.select([self._source], [self._writer], [], 0)
        if not readable or not writable:
            return False
        try:
            # Reading the terminal in the background would stop the launcher (SIGTTIN).
            return os.tcgetpgrp(self._source) == os.getpgrp()
        except OSError:  # not the terminal of this process' session
            return True
