"""Temporary folders that are removed even when their process is killed. No TensorFlow here.

A supervised task creates them in the supervisor's folder, which the supervisor removes. Any other process creates them in the system's
folder for temporary files, and first removes folders of dead processes. A live process holds a lock on its folder; unlike a process id,
this also works where each container has its own process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator

from tfdist.runtime.end import hooks
from tfdist.runtime.files import WriteError, write_error_reason
from tfdist.runtime.log import logger
from tfdist.runtime.report import progress

OF_ALL_PROCESSES = "/tmp"  # not TMPDIR, which may differ
_NEW = "tfdist-new-"  # prefix of folders that have no lock yet
_folders: set[str] = set()  # of this process
_warned: set[str] = set()


@contextlib.contextmanager
def temporary_folder(otherwise: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """Creates a temporary folder, and removes it at the end.

    Args:
        otherwise: The parent folder to use if temporary files cannot be written; None means that this is an error.

    Raises:
        WriteError: The folder cannot be created.
    """
    try:
        folder, lock = _make(otherwise)
    except OSError as e:
        raise WriteError(
            f"cannot make a temporary folder in {os.environ.get('TMPDIR') or '/tmp'}: {write_error_reason(e)}. Free the disk, or set TMPDIR "
            "to a folder on another one."
        ) from e
    _folders.add(folder)
    hooks.at_end(hooks.Stage.FILES, _remove_all)  # a thread may still use a folder when its process ends
    hooks.in_child(_folders.clear)
    try:
        yield folder
    finally:
        if folder in _folders:  # in a forked child it is the parent's
            _folders.remove(folder)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_all() -> None:
    for folder in [*_folders]:
        shutil.rmtree(folder, ignore_errors=True)


def user_folder() -> str | None:
    """Returns a folder for files that this user's processes on this host share, such as locks; None if it cannot be used.

    Only this user can access it. A folder of that name that another user has created, or can access, is not used.
    """
    folder = os.path.join(OF_ALL_PROCESSES, f".tfdist-{os.geteuid()}")
    try:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        status = os.lstat(folder)
    except OSError:  # a system without this folder, or a full disk
        return None
    is_private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return folder if is_private else None


def warn_if_temporary(path: str, error: BaseException) -> bool:
    """Warns, once for each folder, if a file that cannot be written is in a temporary folder of this process; returns whether it is."""
    for folder in _folders:
        if path.startswith(folder + os.sep):
            if folder not in _warned:
                _warned.add(folder)
                logger.warning(
                    f"cannot write temporary files in {folder}: {write_error_reason(error)}; the training continues without them. Free the "
                    "disk, or set TMPDIR to a folder on another one."
                )
            return True
    return False


def _make(otherwise: str | os.PathLike[str] | None) -> tuple[str, int]:
    """Returns a new folder and the open file that locks it."""
    try:
        parent = progress.task_files() or tempfile.gettempdir()
        prefix = f"tfdist-{re.sub(r'[^A-Za-z0-9_.]', '_', socket.gethostname())}-"
        _remove_left(parent, prefix)
        new = tempfile.mkdtemp(prefix=_NEW, dir=parent)
    except OSError:
        if otherwise is None:
            raise
        prefix = ".tfdist-"
        new = tempfile.mkdtemp(prefix=_NEW, dir=os.path.abspath(otherwise))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # without locks other processes cannot lock it, either
        pass
    # Rename it only after the lock: without the lock other processes would remove it as a dead process's folder.
    folder = os.path.join(os.path.dirname(new), prefix + os.path.basename(new).removeprefix(_NEW))
    os.rename(new, folder)
    return folder, lock


def _remove_left(parent: str, prefix: str) -> None:
    """Removes this user's temporary folders of this host whose processes have ended."""
    for path in pathlib.Path(parent).glob(f"{prefix}*"):
        try:
            if os.lstat(path).st_uid != os.geteuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # it is no folder, or another process has removed it
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its process is alive
            pass
        finally:
            os.close(lock)
