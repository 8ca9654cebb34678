"""Where the wall time has gone so far."""

from __future__ import annotations

from tfdist.monitoring.meter import Meter
from tfdist.runtime import goodput


class GoodputMeter(Meter):
    """Reads what `Goodput` has counted on the chief; without that callback, nothing."""

    def read(self) -> dict[str, float | None]:
        ledger = goodput.current()
        if ledger is None or not self.is_chief:
            return {}
        seconds = ledger.now()
        parts: dict[str, float | None] = {f"goodput_seconds/{part}": value for part, value in seconds.items()}
        return {"goodput/productive": seconds["steps"] / (sum(seconds.values()) or 1.0), **parts}
