"""Ends a training at a step that is not finite, for the policy `stop`."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdist.gradients.optimizer import skipped_updates


class NonFiniteStop(keras.callbacks.Callback):
    """Raises after a step whose loss, or the gradient of whose update, is not finite. All ranks have the same of both."""

    def on_train_begin(self, logs: Any = None) -> None:
        self._skipped = self._count()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._done = epoch + 1, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        begun, self._done = self._done + 1, batch + 1
        loss = (logs or {}).get("loss", 0.0)
        gradient = self._count() > self._skipped
        if math.isfinite(loss) and not gradient:
            return
        steps = f"Step {begun}" if begun == batch + 1 else f"A step of {begun} to {batch + 1}"
        what = "the loss" if not math.isfinite(loss) else "a gradient"
        raise FloatingPointError(
            f"{steps} of epoch {self._epoch}: {what} is not finite, and nan_policy is 'stop'. Lower the learning rate, clip gradients, "
            "look at the batch, or leave such updates out by nan_policy='skip'."
        )

    def _count(self) -> int:
        return sum(int(number.numpy()) for number in skipped_updates(self.model))
