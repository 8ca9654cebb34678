"""The wall time of a run by part: each moment of a process belongs to one part. No TensorFlow here.

A process writes its seconds by part to a file, so that the next process can continue the count.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

from tfdist.runtime.files import read_file, replacing, warning_once
from tfdist.runtime.report.phase import main as phases

# In the order of the table; only the first part is productive.
PARTS = ("steps", "input_wait", "startup", "compilation", "validation", "saving", "other", "restarts", "repeated_steps")
# The parts of activities (see `phase.Phase`). Others belong to `startup` before the first of these begins, and to `other` afterwards.
_OF_ACTIVITY = {"training": "steps", "compiling": "compilation", "validation": "validation", "saving": "saving"}
_FORM = struct.Struct(f"<{1 + len(PARTS)}d")
_KEEP_SECONDS = 0.1  # between two writes of one part; a write for each step would slow down short steps


class Record(NamedTuple):
    """The content of a ledger's file.

    Attributes:
        until: The time of the last count, by `time.time()`.
        seconds: Seconds by part.
    """

    until: float
    seconds: dict[str, float]


class Ledger:
    """The seconds of this process by part.

    Args:
        begins: The time at which the first part, `"startup"`, begins, by `clock`. None means the start of the process.
        clock: Returns seconds since the epoch.

    Attributes:
        seconds: Seconds by part, without the current part.
    """

    def __init__(self, begins: float | None = None, clock: Callable[[], float] = time.time):
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._clock = clock
        self.begins = psutil.Process().create_time() if begins is None else begins
        self._since = self.begins
        self._part = "startup"
        self._begun = False  # whether a training or a validation has begun
        self._path: str | os.PathLike[str] = ""
        self._file: int | None = None
        self._kept = 0.0

    def switch(self, part: str) -> str:
        """Ends the current part and begins `part`; returns the part that has ended."""
        now = self._clock()
        before = self._part
        self.seconds[before] += max(now - self._since, 0.0)  # a clock may be set back
        self._since = now
        self._part = part
        if self._file is not None and (part != before or not 0 <= now - self._kept < _KEEP_SECONDS):
            self._kept = now
            with self._warning_once():
                os.pwrite(self._file, _FORM.pack(now, *(self.seconds[name] for name in PARTS)), 0)
        return before

    def _warning_once(self) -> contextlib.AbstractContextManager[None]:
        consequence = "but goodput after a restart lacks the time that could not be written. Free the disk."
        return warning_once(self._path, consequence)

    def move(self, seconds: float, part: str) -> None:
        """Attributes seconds of the current part to another part. Call it before `switch` ends the current part."""
        seconds = min(seconds, self._clock() - self._since)
        self.seconds[self._part] -= seconds
        self.seconds[part] += seconds

    def follow(self, activity: str) -> None:
        """Begins the part of a new activity of the process."""
        self._begun = self._begun or activity in ("training", "validation")
        otherwise = "other" if self._begun else "startup"
        self.switch(_OF_ACTIVITY.get(activity, otherwise))

    def now(self) -> dict[str, float]:
        """Returns seconds by part until now."""
        self.switch(self._part)
        return dict(self.seconds)

    def keep(self, path: str | os.PathLike[str]) -> None:
        """Writes the seconds to a file from now on; replaces an existing file."""
        self.close()
        self._path = path
        with self._warning_once():
            with replacing(path) as file:
                self._file = os.dup(file)
            self._kept = 0.0
            self.switch(self._part)

    def continue_from(self, before: Record, saved_steps: float, gap: bool) -> None:
        """Continues the count of an earlier process, of whose steps `saved_steps` seconds need not be repeated.

        With `gap`, the time between the two processes counts as `restarts`; otherwise it does not count.
        """
        for part, seconds in before.seconds.items():
            self.seconds[part] += seconds
        # The steps after the last backup have been paid for, but are trained again.
        repeated = max(before.seconds["steps"] - saved_steps, 0.0)
        self.seconds["steps"] -= repeated
        self.seconds["repeated_steps"] += repeated
        if gap:
            self.seconds["restarts"] += max(self.begins - before.until, 0.0)

    def close(self) -> None:
        """Closes the file, and keeps it."""
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
    """Sets the ledger of the process, which follows its phases; None removes it."""
    global _ledger
    _ledger = ledger
    if ledger is None:
        phases.readers.pop("goodput", None)
    else:
        phases.readers["goodput"] = ledger.follow


def current() -> Ledger | None:
    """Returns the ledger of this process, or None."""
    return _ledger


def move(seconds: float, part: str) -> None:
    """Attributes seconds of the current part to another part, if the process has a ledger."""
    if _ledger is not None:
        _ledger.move(seconds, part)
