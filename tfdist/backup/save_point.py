"""When in a training a backup was taken."""

from __future__ import annotations

import re
from typing import NamedTuple

_FOLDER = re.compile(r"step-(\d+)(-end)?/?")  # some file systems list folders with a slash


class SavePoint(NamedTuple):
    """When in a training a backup was taken; later ones are greater.

    Attributes:
        step: The steps done by then.
        epoch_ended: Whether the epoch of the last step had ended: there may be a backup of that step before it did, too.
    """

    step: int
    epoch_ended: bool

    @property
    def folder(self) -> str:
        """The name of the backup's folder."""
        return f"step-{self.step}" + "-end" * self.epoch_ended

    @classmethod
    def of_folder(cls, name: str) -> SavePoint | None:
        """Returns the save point of the folder of that name, or None if no backup has it."""
        match = _FOLDER.fullmatch(name)
        return match and cls(int(match[1]), bool(match[2]))


BEFORE_ALL = SavePoint(-1, False)  # less than that of any backup
