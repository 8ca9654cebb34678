"""Keeps two runs from writing to one folder.

While a run's chief lives on this host, another run here is refused. Whether one on another host lives cannot be told: there the
run that began last has the folder, and the other ends at its next backup. So a run that somebody took for dead, and started
again elsewhere, does no harm when it wakes up. A supervisor does not restart a run that was refused: it would take the folder back.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid

import psutil
import tensorflow as tf

from tfdist.backup import files
from tfdist.errors import ConfigError
from tfdist.runtime import progress

FILE = "run"
_NAMED = re.compile(r"process (\d+) on (\S+) \(\w+\), begun at ([\d.]+)")
_SAME_TIME = 5.0  # seconds by which two looks at when a process began may differ, as clocks are set
_ENDING_SECONDS = 5.0  # for which a run that is ending is waited for


def _name_process() -> str:
    begun = psutil.Process().create_time()
    return f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex}), begun at {begun:.2f}"


def _name_again() -> None:
    global _THIS_RUN
    _THIS_RUN = _name_process()


_THIS_RUN = _name_process()
os.register_at_fork(after_in_child=_name_again)


class OwnershipMarker:
    """A run's claim to a folder; for the chief.

    Args:
        folder: The folder, which exists.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._path = os.path.join(folder, FILE)

    def check_free(self) -> None:
        """Raises a ConfigError if another process of this host has the folder, and does not end within some seconds."""
        deadline = time.monotonic() + _ENDING_SECONDS
        while (owner := self._owner()) not in (None, _THIS_RUN) and _is_alive(owner or ""):
            if time.monotonic() > deadline:
                progress.mark_refusal()
                raise ConfigError(
                    f"backup_dir {self._folder!r} is another run's, which still runs: {owner}. Give each run a backup_dir of its "
                    "own, or end that process first."
                )
            time.sleep(0.1)

    def acquire(self) -> None:
        """Takes the folder over from any other run."""
        files.replace(self._path, _THIS_RUN, self._path + ".partial")

    def check(self) -> None:
        """Raises a ConfigError if another run has taken the folder over since."""
        owner = self._owner()
        if owner not in (None, _THIS_RUN):
            progress.mark_refusal()
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


def _is_alive(owner: str) -> bool:
    """Whether an owner is a process of this host that has not ended."""
    named = _NAMED.fullmatch(owner)
    if named is None or named[2] != socket.gethostname() or int(named[1]) == os.getpid():
        return False
    try:
        process = psutil.Process(int(named[1]))
        began_then = abs(process.create_time() - float(named[3])) < _SAME_TIME
        return began_then and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, ValueError, OverflowError):
        return False
