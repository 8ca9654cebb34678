"""A run's claim to a folder, which keeps a second run from writing there. No TensorFlow here.

The claim is a lock on a file that names the run. The kernel releases the lock when the last process that holds it ends. The tasks of a
launcher share its lock: their environment has the run's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import time
import uuid
import weakref
from typing import IO, Any

import psutil

from tfdist.errors import ConfigError
from tfdist.runtime import progress
from tfdist.runtime.files import open_own

FILE = "run"
JOB = "TFDIST_RUN"  # set for tasks: the name of the run that their launcher has written
_OWNER = re.compile(r"process (\d+) on (\S+) \(\w+\), begun at ([\d.]+)")
_SAME_TIME = 5.0  # seconds by which two readings of a process's start time may differ, because clocks are adjusted
_ENDING_SECONDS = 5.0  # to wait for a run that is ending
_LONGEST = 4096  # limit of a name, in bytes


class Ownership:
    """A run's claim to a folder; a context manager.

    While a process of the run is alive, other runs get an error. Without file locks, only runs on the same host are detected.

    Args:
        folder: The folder, which exists.
        what: The option that names the folder, for the error.
        file: The name of the lock file in the folder.
    """

    def __init__(self, folder: str | os.PathLike[str], what: str, file: str = FILE):
        self._folder, self._what = os.fspath(folder), what
        self._path = os.path.join(self._folder, file)
        self._lock: IO[bytes] | None = None
        _all.add(self)

    def __enter__(self) -> Ownership:
        self.check_free()
        return self

    def __exit__(self, *error: Any) -> None:
        self.release()

    def check_free(self) -> None:
        """Locks the folder for this run.

        Raises:
            ConfigError: Another run owns the folder and does not end within some seconds, or another user owns the file.
            OSError: The file cannot be created.
        """
        deadline = time.monotonic() + _ENDING_SECONDS
        while not self._try_lock():
            if time.monotonic() > deadline:
                progress.mark_refusal()
                raise ConfigError(
                    f"{self._what} {self._folder!r} belongs to another run, which has not ended: {self.owner() or 'it has no name yet'}. Give each "
                    f"run its own {self._what}, or end that process first."
                )
            time.sleep(0.1)

    def acquire(self) -> None:
        """Writes the name of this run, and replaces another name.

        Raises:
            OSError: The name cannot be written.
        """
        name = this_run().encode()
        descriptor = self._open()
        try:
            os.pwrite(descriptor, name, 0)
            os.ftruncate(descriptor, len(name))
        finally:
            os.close(descriptor)

    def owner(self) -> str | None:
        """Returns the name of the run that owns the folder; None without such a run, or if the name cannot be read."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb", buffering=0) as file:
                return (file.read(_LONGEST) or b"").decode(errors="replace") or None
        return None

    def release(self) -> None:
        """Releases the lock, and removes the file if it names this run."""
        lock, self._lock = self._lock, None
        if lock is not None:
            if self.owner() == this_run():
                os.unlink(self._path)  # while it is locked
            lock.close()

    def _try_lock(self) -> bool:
        owner = self.owner()
        if owner == this_run():  # another object of this process has the lock
            return True
        if not (shares_lock := owner is not None and owner == os.environ.get(JOB)) and is_alive(owner or ""):
            return False
        lock = os.fdopen(self._open(), "rb", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_NB | (fcntl.LOCK_SH if shares_lock else fcntl.LOCK_EX))
            if not os.path.samestat(os.fstat(lock.fileno()), os.lstat(self._path)):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):  # FileNotFoundError: a run that was ending has removed the file
            lock.close()
            return False
        except OSError:  # the file system has no locks
            pass
        match = _OWNER.fullmatch(owner or "")
        # Else keep the name: that run may be alive on its host.
        if not shares_lock and (match is None or match[2] == socket.gethostname()):
            with contextlib.suppress(OSError):
                self.acquire()
        try:
            fcntl.flock(lock, fcntl.LOCK_NB | fcntl.LOCK_SH)  # downgrade, so that the run's tasks can lock it, too
        except BlockingIOError:  # another run was faster
            lock.close()
            return False
        except OSError:
            pass
        self._lock = lock
        return True

    def _open(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                os.unlink(self._path)  # a link or a pipe that another user may have put there
        # 0o600, because another user could lock a file that they can open.
        return open_own(self._path, os.O_RDWR, 0o600)


def this_run() -> str:
    """Returns the name of this process's run."""
    return _this_run


def is_alive(owner: str) -> bool:
    """Returns whether the name `owner` belongs to another process of this host that has not ended."""
    match = _OWNER.fullmatch(owner)
    if match is None or match[2] != socket.gethostname() or int(match[1]) == os.getpid():
        return False
    try:
        process = psutil.Process(int(match[1]))
        is_same = abs(process.create_time() - float(match[3])) < _SAME_TIME
        return is_same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, ValueError, OverflowError):
        return False


def _name_process() -> str:
    begun = psutil.Process().create_time()
    return f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex}), begun at {begun:.2f}"


def _after_fork() -> None:
    """Gives a forked child its own name, and closes the parent's locks in it."""
    global _this_run
    _this_run = _name_process()
    for owned in _all:
        if owned._lock is not None:
            owned._lock.close()
            owned._lock = None


_all: weakref.WeakSet[Ownership] = weakref.WeakSet()
_this_run = _name_process()
os.register_at_fork(after_in_child=_after_fork)
