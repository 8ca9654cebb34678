"""`Range`: the numbers that a field accepts. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tfdist.errors import format_value

MOST_STEPS = 2**31 - 1  # Keras counts steps in 32 bits
MOST_SECONDS = 10**9  # 31 years; the operating system's timers accept little more
MOST_TASKS = 10_000  # more are a mistake


class Range(NamedTuple):
    """The numbers from `least` to `most`, both included; NaN is outside.

    Attributes:
        least: The smallest number.
        most: The largest number.
        off: Whether `least`, which is 0, turns the option off; messages then contain "(off)".
    """

    least: float
    most: float
    off: bool = False

    def __contains__(self, value: Any) -> bool:
        return bool(self.least <= value <= self.most)

    def __str__(self) -> str:
        return f"{_short(self.least)}{' (off)' if self.off else ''} to {_short(self.most)}"

    def faults(self, where: str, value: float) -> Iterator[str]:
        """Yields the error for a number outside of the range.

        Args:
            where: The field, as `"optimizer.momentum"`.
            value: The number.
        """
        if value not in self:
            yield f"{where} must be {self}. Received: {format_value(value)}."


def _short(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.7g}"
