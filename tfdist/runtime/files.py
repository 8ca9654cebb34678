"""Functions that read users' files and write tfdist's own, safely where a link, FIFO or device has a file's name. No TensorFlow here.

A file that others read is written under another name and then renamed (`replacing`); a file written in place is opened by `open_own`.
A file in a folder that other users may write to is read by `open_regular`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import stat
import time
from collections.abc import Iterator
from typing import BinaryIO

from tfdist.runtime.log import logger

LARGEST = 1 << 26  # limit in bytes of a file that is read into memory
_STREAM_SECONDS = 60.0
# What a shell passes for `<(command)`, and programs for `-`.
_STREAMS = (
    "/dev/fd/",
    "/proc/self/fd/",
    "/dev/stdin",
    "/dev/null",
)
_GRAPH_NODE = re.compile(r"\{\{.*?\}\} ?")  # TensorFlow's prefix of a message: the operation's name
_REASON_LENGTH = 120
_warned: set[str | os.PathLike[str]] = set()  # the files of `warning_once`


def read_file(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Returns the content of a file. It follows links to files, because mounted tokens and configurations are links.

    Args:
        path: The file, or a pipe that a shell passes as a file; the pipe must end within 60 s.
        most: The largest size, in bytes.

    Raises:
        OSError: The file cannot be read, is larger, or is a FIFO, a socket or a device.
    """
    waits = os.fspath(path).startswith(_STREAMS)
    content = bytearray()
    limit = time.monotonic() + _STREAM_SECONDS
    # O_NONBLOCK, because `open` itself would wait for a FIFO's writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not waits and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise _irregular(path, kind_of(mode))
        while len(content) <= most:
            try:
                part = os.read(file.fileno(), 2**20)
            except BlockingIOError:
                if not waits:  # the kernel's log is a regular file that blocks at its end
                    raise _irregular(path, "one that waits") from None
                if not select.select([file], [], [], max(limit - time.monotonic(), 0.0))[0]:
                    why = f"its writer has not ended within {_STREAM_SECONDS:g} s"
                    raise OSError(errno.ETIMEDOUT, why, os.fspath(path)) from None
                continue
            if not part:
                return bytes(content)
            content += part
    raise OSError(errno.EFBIG, f"expected at most {most >> 20} MB, and found more", os.fspath(path))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file to read it, without following a link or waiting for a FIFO's writer.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    return open(path, "rb", opener=_regular)


def _regular(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise _irregular(path, "a link") from None
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _irregular(path, kind_of(mode))
    return descriptor


def is_trusted(file: BinaryIO) -> bool:
    """Returns whether an open file belongs to root, to this process's user or to the owner of its folder."""
    return os.fstat(file.fileno()).st_uid in (0, *_trusted(file.name))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[int]:
    """Creates a file under another name and renames it at the end: an existing link, FIFO or file is replaced, not opened.

    Yields:
        The descriptor to write to.

    Raises:
        OSError: The file cannot be created; the old file is unchanged.
    """
    partial = f"{os.fspath(path)}.partial"
    try:
        os.unlink(partial)  # left by a killed process, or planted
    except FileNotFoundError:
        pass
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor
        os.replace(partial, path)
    except BaseException:
        try:
            os.unlink(partial)
        except OSError:  # the first error is the cause
            pass
        raise
    finally:
        os.close(descriptor)


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file so that a reader sees the old content or the new one.

    Raises:
        OSError: The file cannot be written; the old file is unchanged.
    """
    with replacing(path) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(content)


def open_own(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Returns the descriptor of a file that this program writes to in place; creates the file if it does not exist.

    Args:
        path: The file.
        flags: The flags of `os.open`.
        mode: The permissions of a new file.

    Raises:
        OSError: The file cannot be opened, is not a regular file (a link, a FIFO), or belongs to a user who owns neither this
            process nor the folder.
    """
    trusted = _trusted(path)
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise _irregular(path, kind_of(status.st_mode, path), "; remove it")
        if status.st_uid not in trusted:
            raise _irregular(path, f"one of user {status.st_uid}", "; remove it, if it is not in use")
        if status.st_nlink > 1:  # another user may have linked a file of this one's to the name
            raise _irregular(path, "one with another name", "; remove it")
    except FileNotFoundError:  # `open` creates it
        pass
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in trusted:  # created since the check
        os.close(descriptor)
        raise _irregular(path, "another one", "; remove it")
    return descriptor


def _trusted(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Returns the owner of this process and that of a file's folder."""
    # Network storage may show another id of this user; it then shows the same id for the folder.
    return os.geteuid(), os.stat(os.path.dirname(path) or ".").st_uid


def check_opens(path: str | os.PathLike[str]) -> None:
    """Raises an OSError if a file that other code opens is a FIFO or a socket, because that code would block."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:  # the other code reports it
        return
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise _irregular(path, kind_of(mode))


def kind_of(mode: int, path: str | os.PathLike[str] = "") -> str:
    """Returns the kind of a file in words, such as `"a FIFO"`; for a link at `path`, with its target."""
    if stat.S_ISLNK(mode):
        return f"a symbolic link to {os.readlink(path)}" if path else "a symbolic link"
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _irregular(path: str | os.PathLike[str], kind: str, remedy: str = "") -> OSError:
    return OSError(errno.EINVAL, f"expected a regular file, and found {kind}{remedy}", os.fspath(path))


@contextlib.contextmanager
def warning_once(path: str | os.PathLike[str], consequence: str) -> Iterator[None]:
    """Warns of a file that cannot be written, once in this process, instead of raising the error: the training continues."""
    try:
        yield
    except OSError as e:
        if path not in _warned:
            _warned.add(path)
            logger.warning(
                f"cannot write {os.fspath(path)}: {write_error_reason(e)}; the training continues, {consequence}"
            )


class WriteError(OSError):
    """A file could not be written; the old one is unchanged."""


def write_error_reason(error: BaseException) -> str:
    """Returns why a file could not be written, in a few words: the operating system's message if there is one."""
    if isinstance(error, WriteError):
        return str(error)
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    text = str(getattr(error, "message", None) or error)
    full = os.strerror(errno.ENOSPC)
    if full in text:  # an error of a library, which has no number
        return full
    return _GRAPH_NODE.sub("", text).partition("\n")[0][:_REASON_LENGTH] or type(error).__name__
