"""The workers' shares of a batch, in proportion to their speed (`batch_shares="by_speed"`)."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.aliases import Json
from tfdist.compat import tf_cluster

EVEN = 1000  # a worker's number while all shares are even


class BatchShares:
    """Each worker's share of a batch, as a whole number in proportion to it. Equal on all workers; each has one replica.

    Attributes:
        is_settled: Whether the shares stay until the workers' speeds change; else they are being measured.
    """

    def __init__(self, workers: int):
        with tf.init_scope(), tf.device("CPU:0"):
            # Not a variable of the strategy. A step reads it, so that new shares need no new trace.
            self._numbers = tf_cluster.ResourceVariable(
                [EVEN] * workers, dtype=tf.int64, trainable=False, name="batch_shares"
            )
        self.is_settled = False

    @property
    def numbers(self) -> list[int]:
        numbers: list[int] = self._numbers.numpy().tolist()
        return numbers

    @property
    def fractions(self) -> list[float]:
        """Each worker's part of a batch."""
        total = sum(self.numbers)
        return [number / total for number in self.numbers]

    def assign(self, numbers: Sequence[int]) -> None:
        self._numbers.assign(numbers)

    def bounds(self, size: tf.Tensor) -> tf.Tensor:
        """Returns where each worker's part of `size` examples begins, and `size`. int64."""
        ends = tf.cumsum(self._numbers.read_value())
        return tf.concat([[0], size * ends // ends[-1]], 0)

    def state(self) -> Json:
        """Returns the state for a backup."""
        return {"numbers": self.numbers, "is_settled": self.is_settled}

    def restore(self, state: Json) -> None:
        """Restores a state; that of another number of workers is ignored, and the shares are measured again."""
        if state and len(state["numbers"]) == len(self.numbers):
            self.assign(state["numbers"])
            self.is_settled = state["is_settled"]
