"""Reads files that a user names. No TensorFlow here."""

from __future__ import annotations

import errno
import os
import stat

_STREAMS = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin", "/dev/null")  # what a shell makes of `<(command)` and `-`


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Returns what a file holds, and does not wait for the writer of a named pipe.

    Raises:
        OSError: It cannot be read, or is a named pipe, a socket or a device.
    """
    # A named pipe without a writer would not even open.
    waits = os.fspath(path).startswith(_STREAMS)
    descriptor = os.open(path, os.O_RDONLY | (0 if waits else os.O_NONBLOCK))
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not waits and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "expected a regular file, and found a named pipe or a device", os.fspath(path))
        return file.read()
