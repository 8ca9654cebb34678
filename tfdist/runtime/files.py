"""Functions that read users' files and write tfdist's own, safely where a link, FIFO or device has a file's name. No TensorFlow here.

A file that others read is written under another name and then renamed (`replacing`); a file written in place is opened by `open_own`.
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


def read_file(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Returns the content of a file. It follows links to files, because mounted tokens and configurations are links.

    Args:
        path: The file, or a pipe that a shell passes as a file; the pipe must end within 60 s.
        most: The largest size, in bytes.

    Raises:
        OSError: The file cannot be read, is larger, or is a FIFO, a socket or a device.
    """
    waits, content = os.fspath(path).startswith(_STREAMS), bytearray()
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


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[int]:
    """Creates a file under another name and renames it at the end: an existing link, FIFO or file is replaced, not opened.

    Yields:
        The descriptor to write to.

    Raises:
        OSError: The file cannot be created; the old file is unchanged.
    """
    partial = f"{os.fspath(path)}.partial"
    with contextlib.suppress(FileNotFoundError):  # left by a killed process, or planted
        os.unlink(partial)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
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
    # Network storage may show another id of this user; it then shows the same id for the folder.
    trusted = (os.geteuid(), os.stat(os.path.dirname(path) or ".").st_uid)
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise _irregular(path, kind_of(status.st_mode, path), "; remove it")
        if status.st_uid not in trusted:
            raise _irregular(path, f"one of user {status.st_uid}", "; remove it, if it is not in use")
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in trusted:  # created since the check
        os.close(descriptor)
        raise _irregular(path, "another one", "; remove it")
    return descriptor


def check_opens(path: str | os.PathLike[str]) -> None:
    """Raises an OSError if a file that other code opens is a FIFO or a socket, because that code would block."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(path).st_mode
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
    if (full := os.strerror(errno.ENOSPC)) in text:
        return full
    return _GRAPH_NODE.sub("", text).partition("\n")[0][:_REASON_LENGTH] or type(error).__name__
