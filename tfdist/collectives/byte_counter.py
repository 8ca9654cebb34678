"""Counts the bytes that exchanges would send: one rank that stands for any number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.in_process import InProcessCommunicator
from tfdist.collectives.requests import Cond


class ByteCounter(InProcessCommunicator):
    """A rank of a group that is not there: counts the bytes that it would send.

    Args:
        size: The number of ranks.

    Attributes:
        sent: Bytes sent by a rank: all-reduce 2 (N-1)/N of its tensors' bytes (a ring), all-gather N-1 times them, all-to-all
            (N-1)/N of them.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self.ranks = [0]
        self.sent = 0.0

    def _answer(self, asked: list[Any]) -> list[Any]:
        if isinstance(asked[0], Cond):  # what lasts
            return self.run([asked[0].if_false()], self._lane)
        return super()._answer(asked)

    def _all_reduce(self, tensors: list[Sequence[tf.Tensor]], largest: bool) -> list[list[tf.Tensor]]:
        self.sent += 2 * (self.size - 1) / self.size * sum(map(_bytes, tensors[0]))
        return [list(tensors[0])]

    def _all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        self.sent += (self.size - 1) * _bytes(tensors[0])
        return [tf.broadcast_to(tensors[0], [self.size, *tensors[0].shape])]

    def _all_to_all(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        self.sent += (self.size - 1) / self.size * _bytes(tensors[0])
        return list(tensors)


def _bytes(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() * tensor.dtype.size
