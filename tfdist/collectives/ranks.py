"""Exchange of a few numbers, texts and decisions among the tasks of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_PIECE = 256  # bytes: a text is padded to a multiple, because TensorFlow traces a function for each length


class Ranks:
    """Exchanges a few numbers and texts among the tasks of a strategy. Every method is a collective: every rank must call it.

    Args:
        strategy: The strategy.
        rank: This task's rank.
        names: The names of all tasks, for messages.

    Attributes:
        rank: This task's rank.
        size: The number of tasks.
        names: The names of all tasks.
    """

    def __init__(self, strategy: tf.distribute.Strategy, rank: int, names: Sequence[str]):
        self._strategy = strategy
        self.names = names
        self.rank = rank
        self.size = len(names)
        self._sum = tf.function(lambda values: strategy.reduce("SUM", values), autograph=False)

    @property
    def is_chief(self) -> bool:
        """Returns whether this is the task that decides and writes files."""
        return self.rank == 0

    def gather(self, *numbers: float) -> np.ndarray:
        """Returns every rank's numbers, `[size, len(numbers)]` float64."""
        if self.size == 1:
            return np.array([numbers], np.float64)
        row = np.zeros((self.size, len(numbers)), np.float64)
        row[self.rank] = numbers
        return self._reduce(row).numpy()

    def broadcast_scalar(self, value: float) -> float:
        """Returns the chief's number."""
        return float(self.gather(float(value))[0, 0])

    def any(self, value: bool) -> bool:
        """Returns whether `value` is true on any rank."""
        return bool(self.gather(float(value)).any())

    def gather_texts(self, text: str) -> list[str]:
        """Returns every rank's text, by rank."""
        encoded = text.encode(errors="replace")
        lengths = self.gather(len(encoded)).astype(int)[:, 0]
        if not lengths.any():
            return [""] * self.size
        padded = encoded.ljust(-(-int(lengths.max()) // _PIECE) * _PIECE)
        rows = self.gather(*padded).astype(np.uint8)
        return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]

    def agree(self, reason: str) -> str:
        """Returns the first non-empty reason of all ranks, or an empty text. Appends the names of its tasks unless all tasks have it."""
        reasons = self.gather_texts(reason)
        first = next(filter(None, reasons), "")
        tasks = [name for name, other in zip(self.names, reasons, strict=True) if other == first]
        return first if len(tasks) == self.size else f"{first} ({', '.join(tasks)})"

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.gather(0.0)

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value."""
        return value if self.size == 1 else self._reduce(value if self.is_chief else tf.zeros_like(value))

    def _reduce(self, value: Any) -> tf.Tensor:
        replicas = self._strategy.num_replicas_in_sync // self.size

        def once(context: Any) -> tf.Tensor:
            first = context.replica_id_in_sync_group % replicas == 0
            return tf.convert_to_tensor(value) if first else tf.zeros_like(value)

        values = self._strategy.experimental_distribute_values_from_function(once)
        # Calls a concrete function: `self._sum` would warn the user that it is traced for several shapes.
        return self._sum.get_concrete_function(values)(values)
