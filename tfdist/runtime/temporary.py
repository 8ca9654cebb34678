"""Temporary folders that are removed even when their process is killed. No TensorFlow here.

A supervised task creates them in the supervisor's folder, which the supervisor removes. Any other process creates them in the system's
folder for temporary files, and first removes folders of dead processes. A live process holds a lock on its folder; unlike a process id,
this also works where each container has its own process ids.
"""

from __future__ import annotations

import atexit
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

from tfdist.runtime import progress
from tfdist.runtime.files import WriteError, write_error_reason
from tfdist.runtime.log import logger

_OF_ALL_PROCESSES = "/tmp"  # not TMPDIR, which may differ
_NEW = "tfdist-new-"  # prefix of folders that have no lock yet
# The folders of this process and the process itself: a thread may still use a folder when its process ends.
_folders: dict[str, int] = {}
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
    _folders[folder] = os.getpid()
    try:
        yield folder
    finally:
        _folders.pop(folder, None)
        _warned.discard(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@atexit.register
def _remove_all() -> None:
    # The folders of a forked child may be its parent's.
    for folder in [folder for folder, process in _folders.items() if process == os.getpid()]:
        shutil.rmtree(folder, ignore_errors=True)


def user_folder() -> str | None:
    """Returns a folder for files that this user's processes on this host share, such as locks; None if it cannot be used.

    Only this user can access it. A folder of that name that another user has created, or can access, is not used.
    """
    folder = os.path.join(_OF_ALL_PROCESSES, f".tfdist-{os.geteuid()}")
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return folder
    return None


def is_temporary(path: str) -> bool:
    """Returns whether a path is in a folder that `temporary_folder` has created in this process."""
    return any(path.startswith(folder + os.sep) for folder in _folders)


def warn_once(path: str, error: BaseException) -> None:
    """Warns that a file in a temporary folder cannot be written, once for each folder."""
    folder = next(parent for parent in _folders if path.startswith(parent + os.sep))
    if folder not in _warned:
        _warned.add(folder)
        logger.warning(
            f"cannot write temporary files in {folder}: {write_error_reason(error)}; the training continues without them. Free the disk, or set "
            "TMPDIR to a folder on another one."
        )


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
        prefix, new = ".tfdist-", tempfile.mkdtemp(prefix=_NEW, dir=os.path.abspath(otherwise))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # without locks other processes cannot lock it, either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Rename it only after the lock: without the lock other processes would remove it as a dead process's folder.
    folder = os.path.join(os.path.dirname(new), prefix + os.path.basename(new).removeprefix(_NEW))
    os.rename(new, folder)
    return folder, lock


def _remove_left(parent: str, prefix: str) -> None:
    """Removes this user's temporary folders of this host whose processes have ended."""
    for path in pathlib.Path(parent).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
