"""The memory and the processor time of this process."""

from __future__ import annotations

import time

import keras
import psutil

from tfdist.monitoring.meter import Meter


class SystemMeter(Meter):
    """Measures the resident memory, and the processor time since the last write: 100 is one core in full use."""

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        self._process = psutil.Process()
        self._last = self._times()

    def read(self) -> dict[str, float | None]:
        now, last = self._times(), self._last
        self._last = now
        percent = 100 * (now[0] - last[0]) / (now[1] - last[1])
        return {"system/rss_bytes": self._process.memory_info().rss, "system/cpu_percent": percent}

    @staticmethod
    def _times() -> tuple[float, float]:
        """Processor and wall time, in seconds: psutil counts ticks of 10 ms, too coarse for writes each few ms."""
        return time.process_time(), time.perf_counter()
