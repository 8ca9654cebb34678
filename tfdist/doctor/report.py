"""The findings of `tfdist doctor`, and their formatting. No TensorFlow here."""

from __future__ import annotations

import re
from typing import NamedTuple

from tfdist.errors import printable as escaped
from tfdist.errors import truncate

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
_PASSWORD = re.compile(r"[^\s'\"/=,]+:[^\s'\"/=,]*@")


class Finding(NamedTuple):
    """One row of the table.

    Attributes:
        level: `"ok"`; `"note"`, worth knowing; `"warning"`, a run may suffer; `"error"`, a run would fail.
        what: The subject.
        value: The observed value.
        remedy: The remedy; empty if none is needed.
    """

    level: str
    what: str
    value: str
    remedy: str = ""


def shorten(value: str) -> str:
    """Returns a variable's value so that it can be printed: cut, and with control characters escaped."""
    return printable(truncate(value)) or "(empty)"


def printable(text: str) -> str:
    """Returns a text without `user:password@`, and with control characters escaped: a variable must not steer a terminal."""
    return escaped(_PASSWORD.sub("", text))


def format_bytes(count: float) -> str:
    """Returns a number of bytes for a reader, such as `1.5 GiB`."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB"
