"""A run's claim to a folder, which keeps a second run from writing there. No TensorFlow here.

The claim is a file that names the run; in a local folder it is locked. The kernel releases the lock when the last process that holds it
ends. The tasks of a launcher share its lock: their environment has the run's name. URLs have no locks, and some file systems do not lock
across hosts. There the run that started last owns the folder, and an earlier one stops before it writes again.
"""

from __future__ import annotations

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
from tfdist.runtime.end import hooks
from tfdist.runtime.files import is_trusted, open_own, open_regular
from tfdist.runtime.folders import storage
from tfdist.runtime.report import progress

FILE = "run"
JOB = "TFDIST_RUN"  # set for tasks: the name of their launcher's run
_OWNER = re.compile(r"process (\d+) on (\S+) \(\w+\), begun at ([\d.]+)")
_SAME_TIME = 5.0  # seconds by which two readings of a process's start time may differ, because clocks are adjusted
ENDING_SECONDS = 5.0  # to wait for a run that is ending
_LONGEST = 4096  # limit of a name, in bytes


class Claim:
    """A run's claim to a folder, local or at a URL; a context manager.

    While a process of the run is alive, other runs get an error. Without file locks, only runs on the same host are detected.

    Args:
        folder: The folder.
        what: The option that names the folder, for errors.
        task: The name of a task that shares the folder with the run that owns it, and has a file of its own; empty means the owner.
    """

    def __init__(self, folder: str | os.PathLike[str], what: str, task: str = ""):
        self._folder = os.fspath(folder)
        self._what = what
        self._path = os.path.join(self._folder, f"{FILE}-{task}" if task else FILE)
        self._is_url = storage.is_url(self._folder)
        self._lock: IO[bytes] | None = None
        _all.add(self)

    def __enter__(self) -> Claim:
        self.lock()
        return self

    def __exit__(self, *error: Any) -> None:
        self.release()

    def lock(self) -> None:
        """Creates the folder, and waits until no other live run is known to own it. Does not replace the name of a run on another host.

        Raises:
            ConfigError: Another run owns the folder and does not end within some seconds, or another user owns the file.
            OSError: The file cannot be created.
        """
        storage.make_folder(self._folder)
        deadline = time.monotonic() + ENDING_SECONDS
        while not self._try_lock():
            if time.monotonic() > deadline:
                progress.write(refused=True)
                raise ConfigError(
                    f"{self._what} {self._folder!r} belongs to another run, which has not ended: {self.owner() or 'it has no name yet'}. Give each "
                    f"run its own {self._what}, or end that process first."
                )
            time.sleep(0.1)

    def take(self) -> None:
        """Writes the name of this run, and replaces another name. Call `lock` before.

        Raises:
            OSError: The name cannot be written.
        """
        name = this_run().encode()
        if self._is_url:
            storage.with_retries(lambda: storage.write(self._path, name))
            return
        descriptor = self._open()
        try:
            os.pwrite(descriptor, name, 0)
            os.ftruncate(descriptor, len(name))
        finally:
            os.close(descriptor)

    def check(self) -> None:
        """Raises ConfigError if another run has taken the folder. A supervisor does not restart this run, which would take it back."""
        owner = self.owner()
        if owner not in (None, this_run(), os.environ.get(JOB)):
            progress.write(refused=True)
            raise ConfigError(
                f"{self._what} {self._folder!r} was taken over by a newer run: {owner}. This run writes no more files there, so that the two do "
                f"not overwrite each other's. Give each run its own {self._what}."
            )

    def owner(self) -> str | None:
        """Returns the name of the run that owns the folder; None without such a run, or if the name cannot be read."""
        try:
            return read_name(self._path)
        except OSError:
            return None

    def release(self) -> None:
        """Releases the lock, and removes the file if it names this run."""
        if self._is_url:
            if self.owner() == this_run():
                storage.remove(self._path)
            return
        lock = self._lock
        self._lock = None
        if lock is not None:
            if self.owner() == this_run():
                os.unlink(self._path)  # while it is locked
            lock.close()

    def _try_lock(self) -> bool:
        owner = self.owner() or ""
        if self._is_url:
            return not is_alive(owner)
        if owner == this_run():  # another object of this process has the lock
            return True
        shares_lock = owner != "" and owner == os.environ.get(JOB)
        if not shares_lock and is_alive(owner):
            return False
        kind = fcntl.LOCK_SH if shares_lock else fcntl.LOCK_EX
        lock = os.fdopen(self._open(), "rb", buffering=0)
        try:
            fcntl.flock(lock, fcntl.LOCK_NB | kind)
            if not os.path.samestat(os.fstat(lock.fileno()), os.lstat(self._path)):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):  # FileNotFoundError: a run that was ending has removed the file
            lock.close()
            return False
        except OSError:  # the file system has no locks
            pass
        match = _OWNER.fullmatch(owner)
        # Else keep the name: that run may be alive on its host.
        if not shares_lock and (match is None or match[2] == socket.gethostname()):
            try:
                self.take()
            except OSError:  # a full disk: the lock protects the folder without the name
                pass
        try:
            fcntl.flock(lock, fcntl.LOCK_NB | fcntl.LOCK_SH)  # downgrade, so that the run's tasks can lock it, too
        except BlockingIOError:  # another run was faster
            lock.close()
            return False
        except OSError:  # the file system has no locks
            pass
        self._lock = lock
        return True

    def _open(self) -> int:
        try:
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                os.unlink(self._path)  # a link or a pipe that another user may have put there
        except FileNotFoundError:  # the usual case
            pass
        # 0o600, because another user could lock a file that they can open.
        return open_own(self._path, os.O_RDWR, 0o600)


def read_name(path: str) -> str | None:
    """Returns the name of a run in a file; None if it holds anything else, or another user has written it.

    Raises:
        OSError: The file cannot be read.
    """
    if storage.is_url(path):
        content = storage.read(path)
    else:
        with open_regular(path) as file:
            content = file.read(_LONGEST) if is_trusted(file) else b""
    name = content[:_LONGEST].decode(errors="replace")
    if _OWNER.fullmatch(name) is None:
        return None
    return name


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
    for claim in _all:
        if claim._lock is not None:
            claim._lock.close()
            claim._lock = None


_all: weakref.WeakSet[Claim] = weakref.WeakSet()
_this_run = _name_process()
hooks.in_child(_after_fork)
