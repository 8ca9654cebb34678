"""`Alike`: the check that values are the same on all ranks, before a difference ends a run late or trains another model than intended."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from tfdist.collectives.ranks import Ranks
from tfdist.errors import ConfigError, difference_message

_LINE = 200  # characters of a line in a message
ROUNDING = 1e-5  # between numbers that are alike: processors may round differently


class Alike:
    """Values that must be the same on all ranks. All ranks add the same names in the same order, likely causes of other differences first."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._items: list[tuple[str, str, str]] = []
        self._numbers: list[float] = []
        self._tolerances: list[float] = []

    def add(self, name: str, text: str, remedy: str, number: float | None = None) -> None:
        """Adds a value, as a text of one or more lines. With `number`, that is compared instead, and the text is only shown."""
        tolerance = ROUNDING
        if number is None:
            number = _checksum(text)
            tolerance = 0
        self._items.append((name, text, remedy))
        self._numbers.append(number)
        self._tolerances.append(tolerance)

    def difference(self) -> str:
        """Returns the message about the first value that differs from the chief's on some rank; empty if there is none. A collective."""
        if self._ranks.size == 1 or not self._items:
            return ""
        # Ranks whose arguments differ in kind add different values after these; the values before tell the difference.
        common = int(self._ranks.gather(len(self._items)).min())
        gathered = self._ranks.gather(*self._numbers[:common])
        limits = self._tolerances[:common] * np.maximum(1, np.abs(gathered).max(0))
        unlike = np.abs(gathered - gathered[0]) > limits
        if not unlike.any():
            return ""
        first = int(unlike.any(0).argmax())
        name, text, remedy = self._items[first]
        lines = self._ranks.gather_texts(self._first_unlike_line(text)[:_LINE])
        shown = [0, *np.flatnonzero(unlike[:, first])]
        return f"{difference_message(name, {self._ranks.names[rank]: lines[rank] for rank in shown})} {remedy}"

    def check(self, error: Callable[[str], Exception] = ConfigError) -> None:
        """Raises an error, on all ranks, if a value differs. A collective."""
        message = self.difference()
        if message:
            raise error(message)

    def _first_unlike_line(self, text: str) -> str:
        """Returns this rank's line at the first number at which the ranks' lines differ; all lines if none differs. A collective."""
        lines = text.splitlines()
        most = int(self._ranks.gather(len(lines)).max())
        lines += [""] * (most - len(lines))
        checksums = self._ranks.gather(*map(_checksum, lines))
        unlike = (checksums != checksums[:1]).any(0)
        if not unlike.any():
            return " ".join(lines)
        return lines[int(unlike.argmax())]


def _checksum(text: str) -> float:
    return float(zlib.crc32(text.encode(errors="replace")))
