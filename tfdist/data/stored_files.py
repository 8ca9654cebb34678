"""Files of stored data: their search by a pattern, and the check that they stay unchanged while a training reads them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable

from tfdist.errors import ConfigError

MOST_FAULTS = 10

Version = tuple[int, int, int]  # a file's size, time of change and inode


def find(path: str, endings: tuple[str, ...]) -> list[str]:
    """Returns the sorted files of a folder, or of a pattern, whose names have one of the endings."""
    if os.path.isdir(path):
        path = os.path.join(glob.escape(path), "*")
    return sorted(f for f in glob.glob(path) if f.endswith(endings) and os.path.isfile(f))


def version(stat: os.stat_result) -> Version:
    """Returns the version of a file."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def check_unchanged(path: str, opened: Version) -> None:
    """Raises ValueError if a file has changed: beyond the end of a shorter file, a memory map would end the process."""
    try:
        now = version(os.stat(path))
    except OSError as e:
        raise ValueError(
            f"{path} cannot be read any longer: {e.strerror}. Keep the files of a training in place until it ends."
        ) from e
    if now != opened:
        raise ValueError(
            f"{path} has changed since it was opened ({opened[0]:,} bytes then, {now[0]:,} now). Start the "
            "training again after the files are complete, and write new data under new names."
        )


def raise_all(faults: Iterable[str]) -> None:
    """Raises ConfigError with the first errors and the number of the others, if there are any."""
    faults = list(faults)
    further = len(faults) - MOST_FAULTS
    if further > 0:
        faults = [*faults[:MOST_FAULTS], f"{further} further errors; fix these first."]
    if faults:
        raise ConfigError(faults)
