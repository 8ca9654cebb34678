"""Keeps two runs from writing to one folder: the one that began last has it, and the other ends at its next backup.

So a run that somebody took for dead, and started again elsewhere, does no harm when it wakes up.
"""

from __future__ import annotations

import os
import socket
import uuid

import tensorflow as tf

from tfdist.backup import files
from tfdist.errors import ConfigError

FILE = "run"
_THIS_RUN = f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex})"


class OwnershipMarker:
    """A run's claim to a folder; for the chief.

    Args:
        folder: The folder, which exists.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._path = os.path.join(folder, FILE)

    def acquire(self) -> None:
        """Takes the folder over from any other run."""
        files.replace(self._path, _THIS_RUN, self._path + ".partial")

    def check(self) -> None:
        """Raises a ConfigError if another run has taken the folder over since."""
        owner = self._owner()
        if owner not in (None, _THIS_RUN):
            raise ConfigError(
                f"backup_dir {self._folder!r} is another run's, which began later: {owner}. This one ends, as two would "
                "spoil each other's backups. Give each run a backup_dir of its own."
            )

    def release(self) -> None:
        """Gives the folder back, if it is still this run's."""
        if self._owner() == _THIS_RUN:
            tf.io.gfile.remove(self._path)

    def _owner(self) -> str | None:
        try:
            return files.read(self._path).decode(errors="replace") or None
        except files.ReadError:  # it is not there, or cannot be told
            return None
