"""What tasks tell the supervisor that started them, and it tells them. No TensorFlow here.

They share a folder, named by an environment variable: in it each task keeps its step and that of the last backup, and the
supervisor the number of restarts.
"""

from __future__ import annotations

import os
import pathlib
import struct
from typing import NamedTuple

FOLDER = "TFDIST_PROGRESS"
_FORM = struct.Struct("<qq")
_RESTARTS = "restarts"


class Steps(NamedTuple):
    """How far a task is.

    Attributes:
        done: Training steps done.
        saved: The step of the last backup, from which a restart goes on; 0 without any.
    """

    done: int
    saved: int


class Progress:
    """A task's own file; without a supervisor, nothing.

    Args:
        name: The task's name, as `worker-1`.
    """

    def __init__(self, name: str):
        folder = os.environ.get(FOLDER)
        self._file: int | None = None
        if folder and os.path.isdir(folder):
            self._file = os.open(pathlib.Path(folder, name), os.O_WRONLY | os.O_CREAT)
        self._steps = Steps(0, 0)

    def write(self, done: int | None = None, saved: int | None = None) -> None:
        """Tells what has changed; cheap enough for every step."""
        before = self._steps
        self._steps = Steps(before.done if done is None else done, before.saved if saved is None else saved)
        if self._file is not None and self._steps != before:
            os.pwrite(self._file, _FORM.pack(*self._steps), 0)


def read(folder: str | os.PathLike[str], name: str) -> Steps | None:
    """Returns how far a task is, or None if it has not said so."""
    try:
        return Steps(*_FORM.unpack(pathlib.Path(folder, name).read_bytes()))
    except (OSError, struct.error):
        return None


def clear(folder: str | os.PathLike[str], restarts: int) -> None:
    """Forgets how far tasks were, and tells those to come of how many restarts they are."""
    for path in pathlib.Path(folder).iterdir():
        path.unlink()
    write_restarts(folder, restarts)


def write_restarts(folder: str | os.PathLike[str], restarts: int) -> None:
    """Tells the tasks of how many restarts they are."""
    pathlib.Path(folder, _RESTARTS).write_text(str(restarts))


def restarts() -> int:
    """Returns how often the supervisor has restarted this run, or a task of it; 0 without a supervisor."""
    try:
        return int(pathlib.Path(os.environ[FOLDER], _RESTARTS).read_text())
    except (KeyError, OSError, ValueError):
        return 0
