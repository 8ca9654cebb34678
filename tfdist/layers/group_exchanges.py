"""Exchanges of activations within a model group, of which each worker computes a part: Megatron-LM's conjugate functions, and gathers.

Each function exchanges either in the forward pass or in the backward pass. All workers of a group call the same functions in the same order.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.collectives.communicator import Communicator
from tfdist.replicas import step_context


class GroupExchanges:
    """Exchanges of the workers of a model group.

    Attributes:
        size: The number of workers.
        rank: This worker's position among them.
    """

    def __init__(self, group: Communicator, rank: int):
        self._group = group
        self.size = group.processes
        self.rank = rank

    def shared(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value that all workers have, for use in the parts of all workers. Backward: the sum of their gradients."""

        @tf.custom_gradient
        def shared(value: tf.Tensor) -> Structure:
            return tf.identity(value), self._add

        return shared(value)

    def total(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all workers' values. Backward: the gradient, which all workers have."""

        @tf.custom_gradient
        def total(value: tf.Tensor) -> Structure:
            return self._add(value), tf.identity

        return total(value)

    def whole(self, part: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns the parts of all workers, joined along an axis. Backward: this worker's part of the gradient."""

        @tf.custom_gradient
        def whole(part: tf.Tensor) -> Structure:
            return self._join(part, axis), lambda upstream: self.cut(upstream, axis)

        return whole(part)

    def part(self, whole: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns this worker's part, along an axis, of a value that all workers have. Backward: the gradients of all parts, joined."""

        @tf.custom_gradient
        def part(whole: tf.Tensor) -> Structure:
            return self.cut(whole, axis), lambda upstream: self._join(upstream, axis)

        return part(whole)

    def rows(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the values of all workers, `[workers, ...]`, without a gradient."""
        number, lane = _turn()
        (rows,) = self._group.gather([value[tf.newaxis]], number, lane)
        return tf.ensure_shape(rows, [self.size, *value.shape])

    def own(self, ids: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns which ids are among the `count` ids of this worker, and their positions there: 0 for another worker's id, -1 for no one's.

        As on one device, a lookup at -1 fails.
        """
        local = ids - self.rank * count
        is_own = (local >= 0) & (local < count)
        is_known = (ids >= 0) & (ids < count * self.size)
        return is_own, tf.where(is_own, local, tf.where(is_known, 0, -1))

    def cut(self, whole: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns this worker's part, along an axis, of a value that all workers have."""
        return tf.split(whole, self.size, axis)[self.rank]

    def _add(self, value: Structure) -> tf.Tensor:
        value = tf.convert_to_tensor(value)  # the gradient of a lookup is of IndexedSlices
        # A sum in half precision would round each addition.
        narrow = value.dtype in (tf.bfloat16, tf.float16)
        wide = tf.cast(value, tf.float32) if narrow else value
        number, lane = _turn()
        (total,) = self._group.add([wide], number, lane)
        return tf.cast(tf.ensure_shape(total, value.shape), value.dtype)

    def _join(self, part: tf.Tensor, axis: int) -> tf.Tensor:
        return tf.concat(tf.unstack(self.rows(part), self.size), axis)


def _turn() -> tuple[Any, int]:
    """Returns the number of the step in its execution, and the lane of an exchange: 0 for the first one in a step, else 1.

    In lane 0 the exchange waits until all workers have begun the step.
    """
    step = step_context.current()
    if step is None:
        return tf.constant(0), 0
    lane = 1 if step.exchanges_activations else 0
    step.exchanges_activations = True
    return tf.convert_to_tensor(step.number), lane
