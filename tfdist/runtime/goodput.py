"""The wall time of a run by part: each moment of a process belongs to one part. No TensorFlow here.

A process keeps its seconds by part in a file, so that they outlive it: the next process continues the count.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil

from tfdist.runtime.files import read_file, replacing, write_error_reason
from tfdist.runtime.log import logger

# In the order of a table; the first is what is wanted.
PARTS = ("steps", "input_wait", "startup", "compilation", "validation", "saving", "other", "restarts", "repeated_steps")
_FORM = struct.Struct(f"<{1 + len(PARTS)}d")
_KEEP_SECONDS = 0.1  # between two writes of one part; a write for each step would slow short ones


class Record(NamedTuple):
    """The content of a ledger's file.

    Attributes:
        until: The time, by `time.time()`, to which it has been counted.
        seconds: Seconds by part.
    """

    until: float
    seconds: dict[str, float]


class Ledger:
    """The seconds of this process by part.

    Args:
        begins: When the first part, `"startup"`, has begun, by `clock`. None means the start of the process.
        clock: Returns seconds since the epoch.

    Attributes:
        seconds: Those of the parts that have ended.
    """

    def __init__(self, begins: float | None = None, clock: Callable[[], float] = time.time):
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._clock = clock
        self.begins = psutil.Process().create_time() if begins is None else begins
        self._since = self.begins
        self._part = "startup"
        self._thread = threading.get_ident()
        self._path: str | os.PathLike[str] = ""
        self._file: int | None = None
        self._has_warned = False
        self._kept = 0.0

    def switch(self, part: str) -> str:
        """Ends the current part and begins `part`; returns the one that has ended."""
        now, before = self._clock(), self._part
        self.seconds[before] += max(now - self._since, 0.0)  # a clock may be set back
        self._since, self._part = now, part
        if self._file is not None and (part != before or not 0 <= now - self._kept < _KEEP_SECONDS):
            self._kept = now
            with self._warning_once():
                os.pwrite(self._file, _FORM.pack(now, *(self.seconds[name] for name in PARTS)), 0)
        return before

    @contextlib.contextmanager
    def _warning_once(self) -> Iterator[None]:
        """A full disk costs the table, not the training."""
        try:
            yield
        except OSError as e:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    f"cannot write {os.fspath(self._path)}: {write_error_reason(e)}; the training goes on, but goodput after a restart counts "
                    "without the time that could not be written. Free the disk."
                )

    def move(self, seconds: float, part: str) -> None:
        """Counts seconds of the current part, which are known only now, as another part's; before `switch` ends it."""
        seconds = min(seconds, self._clock() - self._since)
        self.seconds[self._part] -= seconds
        self.seconds[part] += seconds

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Attributes the time inside to `part`; has no effect in other threads."""
        if threading.get_ident() != self._thread:
            yield
            return
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def now(self) -> dict[str, float]:
        """Returns seconds by part until now."""
        self.switch(self._part)
        return dict(self.seconds)

    def keep(self, path: str | os.PathLike[str]) -> None:
        """Keeps the seconds in a file from now on, which replaces the one that is there."""
        self.close()
        self._path = path
        with self._warning_once():
            with replacing(path) as file:
                self._file, self._kept = os.dup(file), 0.0
            self.switch(self._part)

    def go_on(self, before: Record, saved_steps: float, gap: bool) -> None:
        """Counts on from another process's record.

        Args:
            before: The record of the earlier process.
            saved_steps: The seconds of steps, of those recorded, that need not be repeated.
            gap: Whether the time between the two processes is a restart's; else it does not count.
        """
        for part, seconds in before.seconds.items():
            self.seconds[part] += seconds
        repeated = max(before.seconds["steps"] - saved_steps, 0.0)
        self.seconds["steps"] -= repeated
        self.seconds["repeated_steps"] += repeated
        if gap:
            self.seconds["restarts"] += max(self.begins - before.until, 0.0)

    def close(self) -> None:
        """Leaves the file as it is."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read(path: str | os.PathLike[str]) -> Record | None:
    """Returns the content of a ledger's file, or None if it is missing or damaged."""
    try:
        until, *seconds = _FORM.unpack(read_file(path))
    except (OSError, struct.error):
        return None
    return Record(until, dict(zip(PARTS, seconds, strict=True)))


_ledger: Ledger | None = None


def set_ledger(ledger: Ledger | None) -> None:
    """Makes a ledger the one for which `during` counts; None ends that."""
    global _ledger
    _ledger = ledger


def current() -> Ledger | None:
    """Returns the ledger of this process, or None."""
    return _ledger


def during(part: str) -> contextlib.AbstractContextManager[None]:
    """Attributes the time inside to `part` of the process's ledger, if it has one."""
    return contextlib.nullcontext() if _ledger is None else _ledger.during(part)
