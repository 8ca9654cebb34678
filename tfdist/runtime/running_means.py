"""Means of what several threads measure."""

from __future__ import annotations

import threading


class RunningMeans:
    """The mean of each of some measures since it was last taken; safe in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, value: float) -> None:
        """Adds a value to a measure."""
        with self._lock:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        """Returns the mean of each measure that has a value, and begins anew."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: total / count for name, (total, count) in sums.items()}
