"""`Ranks`: a few numbers among the tasks of a strategy."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


class Ranks:
    """Exchanges a few numbers among the tasks of a strategy.

    Args:
        strategy: The strategy.
        rank: This task's number among `size`.
        size: The number of tasks.
    """

    def __init__(self, strategy: tf.distribute.Strategy, rank: int, size: int):
        self._strategy = strategy
        self.rank = rank
        self.size = size
        self._sum = tf.function(lambda values: strategy.reduce("SUM", values), autograph=False)

    @property
    def is_chief(self) -> bool:
        """Whether this is the task that decides and writes files."""
        return self.rank == 0

    def gather(self, *numbers: float) -> np.ndarray:
        """Returns every rank's numbers, `[size, len(numbers)]` float64. A collective: every rank must call it."""
        if self.size == 1:
            return np.array([numbers], np.float64)
        mine = np.zeros((self.size, len(numbers)), np.float64)
        mine[self.rank] = numbers
        return self._reduce(mine).numpy()

    def broadcast_scalar(self, mine: float) -> float:
        """Returns the chief's number. A collective."""
        return float(self.gather(float(mine))[0, 0])

    def any(self, mine: bool) -> bool:
        """Returns whether it is so on any rank. A collective."""
        return bool(self.gather(float(mine)).any())

    def barrier(self) -> None:
        """Waits for all ranks. A collective."""
        self.gather(0.0)

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value. A collective: every rank must call it."""
        return value if self.size == 1 else self._reduce(value if self.is_chief else tf.zeros_like(value))

    def _reduce(self, value: Any) -> tf.Tensor:
        replicas = self._strategy.num_replicas_in_sync // self.size

        def once(context: Any) -> tf.Tensor:
            first = context.replica_id_in_sync_group % replicas == 0
            return tf.convert_to_tensor(value) if first else tf.zeros_like(value)

        values = self._strategy.experimental_distribute_values_from_function(once)
        # Not called itself: TensorFlow would warn the user of a function that is traced for several shapes.
        return self._sum.get_concrete_function(values)(values)
