"""How long steps wait for their batch and, with parameter servers, how far steps of workers overlap."""

from __future__ import annotations

from tfdist.monitoring.meter import Meter


class ExecutionMeter(Meter):
    """Reads what the model's training function has measured; one of the user's own making measures nothing."""

    def read(self) -> dict[str, float | None]:
        measured = getattr(self.model.train_function, "measured", None)
        return dict(measured.take()) if measured else {}
