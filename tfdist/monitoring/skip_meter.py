"""How many updates were left out, because a gradient was not finite."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.gradients.optimizer import skipped_updates
from tfdist.monitoring.meter import Meter


class SkipMeter(Meter):
    """Reads how many updates this process has left out for `nan_policy`. All replicas leave out the same."""

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        super().begin(model, is_chief)
        self._numbers: list[tf.Variable] | None = None  # found at the first write: to look for optimizers takes long

    def read(self) -> dict[str, float | None]:
        if self._numbers is None:
            self._numbers = skipped_updates(self.model) if self.is_chief else []
        skipped = sum(float(each.numpy()) for each in self._numbers) if self._numbers else None
        return {"train/skipped_updates": skipped}
