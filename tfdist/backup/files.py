"""Access to files of a backup folder. It follows no links, opens only regular files, and distinguishes unreadable from absent files.

Local paths go to the operating system, and URLs to fsspec (`runtime/folders/storage.py`).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection

import tensorflow as tf

from tfdist.errors import ConfigError
from tfdist.runtime.files import kind_of, open_regular
from tfdist.runtime.folders import storage as urls

_CHUNK = 1 << 24  # bytes
_ABSENT = (FileNotFoundError, NotADirectoryError)
# Errors that do not depend on the content of a file.
PASSING = (
    tf.errors.UnavailableError,
    tf.errors.PermissionDeniedError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnauthenticatedError,
    tf.errors.CancelledError,
    OSError,
    MemoryError,
)
ERRORS = (OSError, MemoryError)  # that reading may raise


class ReadError(Exception):
    """A backup cannot be used."""


class CorruptBackupError(ReadError):
    """A backup is damaged: it was read, and differs from the data written."""


class UnfinishedBackupError(CorruptBackupError):
    """A backup has never been complete."""


class UnreadableBackupError(ReadError):
    """A backup cannot be read now, but may be complete."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without TensorFlow's additions."""
    text = getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\{\{function_node .*?\}\} | \[Op:\w+\]", "", text)


def unreadable(path: str, error: BaseException) -> UnreadableBackupError:
    """Returns the error that names a path and why it cannot be read."""
    reason = first_line(error)
    if not isinstance(error, urls.StorageError):  # whose message names the URL
        reason = f"{path} cannot be read: {reason}"
    return UnreadableBackupError(reason)


def is_local(path: str) -> bool:
    """Returns whether the operating system reaches a path."""
    return not urls.is_url(path)


def is_link(path: str) -> bool:
    """Returns whether a path is a link."""
    return is_local(path) and os.path.islink(path)


def list_folder(path: str) -> list[str]:
    """Returns the names in a folder; empty if the folder does not exist. Raises UnreadableBackupError."""
    try:
        return urls.list_folder(path)
    except _ABSENT:
        return []
    except ERRORS as e:
        raise unreadable(path, e) from e


def size(path: str) -> int | None:
    """Returns the size of a regular file in bytes, or None if no file exists. Raises CorruptBackupError for a link, a folder or another type."""
    try:
        if not is_local(path):
            return urls.size(path)
        status = os.lstat(path)
    except _ABSENT:
        return None
    except ERRORS as e:
        raise unreadable(path, e) from e
    if not stat.S_ISREG(status.st_mode):
        raise CorruptBackupError(f"{path} is {kind_of(status.st_mode, path)}, and should be a file")
    return status.st_size


def is_folder(path: str) -> bool:
    """Returns whether a folder exists. Raises CorruptBackupError for a link, a file or another type."""
    try:
        if not is_local(path):
            return urls.is_folder(path)
        mode = os.lstat(path).st_mode
    except _ABSENT:
        return False
    except ERRORS as e:
        raise unreadable(path, e) from e
    if not stat.S_ISDIR(mode):
        raise CorruptBackupError(f"{path} is {kind_of(mode, path)}, and should be a folder")
    return True


def read(path: str) -> bytes:
    """Returns the content of a regular file. Raises CorruptBackupError if the file is missing or not regular, such as a link."""
    if is_local(path) and size(path) is None:
        raise CorruptBackupError(f"{path} is missing")
    try:
        if not is_local(path):
            return urls.read(path)
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError as e:
        raise CorruptBackupError(f"{path} is missing") from e
    except ERRORS as e:
        raise unreadable(path, e) from e


def check_readable(path: str) -> None:
    """Reads a local file to its end. Raises UnreadableBackupError."""
    try:
        with open_regular(path) as file:
            while file.read(_CHUNK):
                pass
    except ERRORS as e:
        raise unreadable(path, e) from e


def check_owners(folder: str, owners: Collection[int]) -> None:
    """Raises ConfigError unless a folder, or file, and the files in it belong to trusted users, given by their numbers."""
    if not is_local(folder):
        return
    for path in (folder, *(os.path.join(folder, name) for name in list_folder(folder))):
        try:
            owner = os.lstat(path).st_uid
        except _ABSENT:  # another task is removing the file
            continue
        except ERRORS as e:
            raise unreadable(path, e) from e
        if owner not in owners:
            raise ConfigError(
                f"{path} belongs to user {owner}, but this run belongs to user {os.geteuid()}: whoever writes a backup decides how "
                f"training continues. If it is yours, change its owner (chown -R {os.geteuid()} {folder}); else remove it."
            )


def discard_irregular(path: str) -> None:
    """Removes a link, a FIFO or a socket at the path of a file that will be written."""
    if is_local(path) and os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        os.unlink(path)
