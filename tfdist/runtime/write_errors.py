"""Files that cannot be written: the error, and the reason in a few words. No TensorFlow here."""

from __future__ import annotations

import errno
import os
import re

_GRAPH_NODE = re.compile(r"\{\{.*?\}\} ?")  # how TensorFlow names an operation before its message
_LENGTH = 120


class WriteError(OSError):
    """A file could not be written; what was there before is unchanged."""


def reason(error: BaseException) -> str:
    """Returns why a file could not be written, in a few words: those of the operating system, where it has said them."""
    if isinstance(error, WriteError):
        return str(error)
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    text = str(getattr(error, "message", None) or error)
    if (full := os.strerror(errno.ENOSPC)) in text:
        return full
    return _GRAPH_NODE.sub("", text).partition("\n")[0][:_LENGTH] or type(error).__name__
