"""Exchanges between the replicas of one process, by ordinary operations."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.communicator import Communicator


class InProcessCommunicator(Communicator):
    """Ranks that are all in this process."""

    def __init__(self, size: int):
        super().__init__(range(size), size)

    def _all_reduce(self, tensors: list[Sequence[tf.Tensor]], largest: bool) -> list[list[tf.Tensor]]:
        add = functools.partial(functools.reduce, tf.maximum) if largest else tf.add_n
        totals = [add(list(each)) for each in zip(*tensors, strict=True)]
        return [list(totals) for _ in self.ranks]

    def _all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.stack(tensors)] * self.size

    def _all_to_all(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.stack([tensor[rank] for tensor in tensors]) for rank in self.ranks]

    def gather(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        return [tf.concat(tensors, 0)] * self.size

    def gather_rows(self, slices: list[tf.IndexedSlices], step: tf.Tensor) -> list[tf.IndexedSlices]:
        rows = tf.concat([each.values for each in slices], 0)
        places = tf.concat([each.indices for each in slices], 0)
        return [tf.IndexedSlices(rows, places, slices[0].dense_shape)] * self.size
