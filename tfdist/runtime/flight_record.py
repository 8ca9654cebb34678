"""The last collectives of this task, in a file that other processes can read even if this one is stopped or killed. No TensorFlow here.

`<task>.collectives` in the log folder is mapped into memory: a record costs no system call. It is a ring: record n has index n modulo 200.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from tfdist.runtime import stacks
from tfdist.runtime.files import open_own

SUFFIX = ".collectives"
LENGTH = 200  # records
RUNNING, DONE, FAILED = b"r", b"d", b"f"
_STATES = {RUNNING: "running", DONE: "done", FAILED: "failed"}
_MAGIC = b"tfdist collectives 1".ljust(32)
# Number from 1, bytes, begun, ended (seconds since the epoch), state, kind in UTF-8.
_FORM = struct.Struct("<qqddc31s")
_END = struct.Struct("<dc")
_END_AT = 24  # offset of the end within a record


class Record(NamedTuple):
    """A collective of a task.

    Attributes:
        number: Its number in the process, from 1.
        kind: The kind, such as `gather`, or `step 12: 5 collectives`.
        size: Bytes of the message.
        state: `running`, `done` or `failed`.
        begun: Time in seconds since the epoch.
        ended: Time of its end, 0 while it runs.
    """

    number: int
    kind: str
    size: int
    state: str
    begun: float
    ended: float


class Ring:
    """The records of this process; without a file it only counts."""

    def __init__(self) -> None:
        self.count = 0
        self._map: mmap.mmap | None = None

    def open(self, task: str) -> None:
        """Creates the file of a task, such as `worker-1`, in the log folder; does nothing without a folder."""
        if self._map is not None or not (folder := stacks.folder()):
            return
        with contextlib.suppress(OSError, ValueError):
            descriptor = open_own(path := pathlib.Path(folder, f"{task}{SUFFIX}"), os.O_RDWR)
            stacks.remove_at_end(path)
            try:
                # The file is not truncated, because a process that still maps it would end. Its blocks are written now, because a later write
                # to a missing block of a full disk would be a SIGBUS.
                size = len(_MAGIC) + LENGTH * _FORM.size
                os.pwrite(descriptor, _MAGIC.ljust(size, b"\0"), 0)
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)

    def begin(self, kind: str, size: int = 0) -> int:
        """Records the start of a collective of `size` bytes; returns its number, for `end`."""
        self.count = number = self.count + 1
        if self._map is not None:
            at = len(_MAGIC) + number % LENGTH * _FORM.size
            _FORM.pack_into(self._map, at, number, size, time.time(), 0.0, RUNNING, kind.encode()[:31])
        return number

    def end(self, number: int, state: bytes = DONE) -> None:
        """Records the end of a collective."""
        if self._map is not None:
            at = len(_MAGIC) + number % LENGTH * _FORM.size
            _END.pack_into(self._map, at + _END_AT, time.time(), state)

    @contextlib.contextmanager
    def recording(self, kind: str, size: int = 0) -> Iterator[None]:
        """Records the collective within the context."""
        number, state = self.begin(kind, size), FAILED
        try:
            yield
            state = DONE
        finally:
            self.end(number, state)


ring = Ring()


def read(path: str | os.PathLike[str]) -> list[Record]:
    """Returns the records of a file, the oldest first. Raises OSError if it cannot be read, or has another format."""
    size = len(_MAGIC) + LENGTH * _FORM.size
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        content = file.read(size)
    if len(content) < size or not content.startswith(_MAGIC):
        raise OSError(0, "not a file of collectives", os.fspath(path))
    records = []
    for number, size, begun, ended, state, kind in _FORM.iter_unpack(content[len(_MAGIC) :]):
        if number:
            name = kind.rstrip(b"\0").decode(errors="replace")
            records.append(Record(number, name, size, _STATES.get(state, "running"), begun, ended))
    return sorted(records)
