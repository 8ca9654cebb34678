"""Reads users' files, and explains in a few words why a file cannot be written. No TensorFlow here."""

from __future__ import annotations

import errno
import os
import re
import stat

_STREAMS = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin", "/dev/null")  # what a shell makes of `<(command)` and `-`
_GRAPH_NODE = re.compile(r"\{\{.*?\}\} ?")  # how TensorFlow names an operation before its message
_REASON_LENGTH = 120


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Returns what a file holds, and does not wait for the writer of a named pipe.

    Raises:
        OSError: It cannot be read, or is a named pipe, a socket or a device.
    """
    # A named pipe without a writer would not even open.
    waits = os.fspath(path).startswith(_STREAMS)
    descriptor = os.open(path, os.O_RDONLY | (0 if waits else os.O_NONBLOCK))
    with open(descriptor, "rb"):
        mode = os.fstat(descriptor).st_mode
        if not waits and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "expected a regular file, and found a named pipe or a device", os.fspath(path))
        content = bytearray()
        try:
            while part := os.read(descriptor, 2**20):
                content += part
        except BlockingIOError:  # the kernel's log, a regular file, waits for more
            raise OSError(errno.EINVAL, "expected a regular file, and found one that waits", os.fspath(path)) from None
        return bytes(content)


class WriteError(OSError):
    """A file could not be written; what was there before is unchanged."""


def write_error_reason(error: BaseException) -> str:
    """Returns why a file could not be written, in a few words: those of the operating system, where it has said them."""
    if isinstance(error, WriteError):
        return str(error)
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    text = str(getattr(error, "message", None) or error)
    if (full := os.strerror(errno.ENOSPC)) in text:
        return full
    return _GRAPH_NODE.sub("", text).partition("\n")[0][:_REASON_LENGTH] or type(error).__name__
