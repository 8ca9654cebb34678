"""Variables that a callback reads as numbers and arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np


@dataclasses.dataclass
class Read:
    """What is read at the end of an epoch."""

    rate: float
    updates: int
    weights: list[np.ndarray]


class Reads(keras.callbacks.Callback):
    """Reads at the end of each epoch, and the number of updates after each step.

    Args:
        halves: Whether it halves the learning rate after each epoch.
        every_step: Whether it reads after each step, too.
    """

    def __init__(self, halves: bool, every_step: bool):
        super().__init__()
        self.epochs: list[Read] = []
        self.steps: list[int] = []
        self._halves, self._every_step = halves, every_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._every_step:
            self.steps.append(int(self.model.optimizer.iterations))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        rate = float(optimizer.learning_rate)
        weights = [np.asarray(weight) for weight in self.model.weights]
        self.epochs.append(Read(rate, int(optimizer.iterations), weights))
        if self._halves:
            optimizer.learning_rate = float(optimizer.learning_rate) / 2
