"""How often a run was restarted, and how many steps it had to repeat."""

from __future__ import annotations

from tfdist.monitoring.meter import Meter
from tfdist.runtime import progress


class FaultMeter(Meter):
    """Reads what the supervisor knows; without a supervisor nothing. The chief alone knows the lost steps."""

    _is_settled = False
    _lost: int | None = None

    def on_step(self, step: int) -> None:
        # Not earlier: of two trainings in one program the first one may have no step left, as it was at its end.
        if self.is_chief and not self._is_settled:
            self._is_settled, self._lost = True, progress.settle_lost_steps()

    def read(self) -> dict[str, float | None]:
        restarts = progress.restarts() if progress.is_supervised() else None
        return {"faults/restarts": restarts, "faults/lost_steps": self._lost}
