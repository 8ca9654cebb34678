"""The bytes that a rank sends for a step."""

from __future__ import annotations

import keras

from tfdist.monitoring.meter import Meter
from tfdist.monitoring.network import WireBytes


class WireMeter(Meter):
    """Measures the bytes per step by the network interfaces, where ranks are in several processes; see `WireBytes`."""

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        cluster_task = getattr(model.distribute_strategy, "cluster_task", None)
        self._wire = WireBytes(*cluster_task) if cluster_task else None

    def on_epoch_begin(self) -> None:
        if self._wire:
            self._wire.on_epoch_begin(0)

    def on_step(self, step: int) -> None:
        if self._wire:
            self._wire.on_train_batch_end(step)

    def read(self) -> dict[str, float | None]:
        return {"comm/bytes_per_step": self._wire.take() if self._wire else None}
