"""Compression of gradients to products of two thin matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.requests import AllReduce, Exchange, RankContext, ReduceResult
from tfdist.compression.base import Compressor, StateSpec
from tfdist.config.compression import PowerSGDOptions

_ROUNDING = 1e-5  # fraction of a column's length below which float32 holds only rounding errors


@dataclasses.dataclass(frozen=True)
class PowerSGD(PowerSGDOptions, Compressor):
    """The sum of a gradient M [p, q] as P [p, r] Q [q, r]^T, by one power iteration per step (Vogels et al., arXiv:1905.13727).

    P = orthogonal(sum M Q), then Q = mean M^T P, two dependent all-reduces; the next step starts with this Q. A kernel's
    last axis is q and all other axes together are p, which gives the thinnest matrices for Keras' layouts. The sum is biased:
    wrap the compressor in `ErrorFeedback`.

    Its arguments are the fields of `PowerSGDOptions`.

    Examples:
        >>> from tfdist.compression import PowerSGD
        >>> PowerSGD(matrix_approximation_rank=2).matrix_approximation_rank
        2
    """

    def state_specs(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        q_shape = self._q_shape(shape)
        if q_shape is None or not self.warm_start:
            return ()
        return (StateSpec("q", q_shape, shared=True, initial=self._random),)

    def _q_shape(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Returns the shape of Q, or None if the gradient is not compressed."""
        if len(shape) < 2 or 0 in shape:
            return None
        q = int(shape[-1])
        p = math.prod(shape) // q
        r = min(self.matrix_approximation_rank, p, q)
        return (q, r) if (p + q) * r * self.min_compression_rate <= p * q else None

    def _random(self, shape: tuple[int, ...], number: int, step: tf.Tensor | int = 0) -> tf.Tensor:
        return tf.random.stateless_normal(shape, [self.random_seed + number, step])

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        q_shapes = [self._q_shape(value.shape) for value in values]
        compressible = [index for index, shape in enumerate(q_shapes) if shape]
        uncompressed = [index for index, shape in enumerate(q_shapes) if not shape]
        matrices = [tf.reshape(values[index], [-1, values[index].shape[-1]]) for index in compressible]
        if self.warm_start:
            previous_q = [states[index][0] for index in compressible]
        else:
            previous_q = [self._random(q_shapes[index] or (), index, member.step) for index in compressible]
        products = [m @ q for m, q in zip(matrices, previous_q, strict=True)]
        sums = yield AllReduce([values[index] for index in uncompressed] + products)
        p_matrices = self._orthogonal(sums[len(uncompressed) :])
        local_q = [tf.matmul(m, p, transpose_a=True) for m, p in zip(matrices, p_matrices, strict=True)]
        q_matrices = yield AllReduce(local_q)

        totals = list(values)
        contributions = list(values)
        new_states = list(states)
        for index, total in zip(uncompressed, sums, strict=False):
            totals[index] = total
        for index, p, q, rank_q, old in zip(compressible, p_matrices, q_matrices, local_q, previous_q, strict=True):
            mean = q / member.size
            # Attributing the mean to every rank, as torch does, gives the same sum. But then the ranks' differences add up in
            # their residuals, step by step, and the residuals grow without bound.
            contributions[index] = tf.reshape(tf.matmul(p, rank_q, transpose_b=True), values[index].shape)
            totals[index] = tf.reshape(tf.matmul(p, q, transpose_b=True), values[index].shape)
            if self.warm_start:  # a column of zeros would stay zero in all later steps
                new_states[index] = (tf.where(tf.reduce_any(tf.not_equal(mean, 0), 0), mean, old),)
        return ReduceResult(totals, contributions, new_states)

    def _orthogonal(self, matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns matrices with orthonormal columns and the same spans (Gram-Schmidt), batched by shape.

        A column that is reduced to rounding errors becomes zeros. Each column is projected twice, because one projection leaves
        some of the other columns in it. Sums along an axis replace matrix products, which TensorFlow splits by its number of threads:
        workers with different numbers of threads must compute the same bits.
        """
        results = list(matrices)
        for shape in dict.fromkeys(tuple(matrix.shape) for matrix in matrices):
            indices = [index for index, matrix in enumerate(matrices) if tuple(matrix.shape) == shape]
            stacked = tf.stack([matrices[index] for index in indices])
            stacked = tf.math.divide_no_nan(stacked, tf.reduce_max(tf.abs(stacked), [1, 2], keepdims=True))
            done = stacked[:, :, :0]
            for number in range(shape[1]):
                column = stacked[:, :, number : number + 1]
                original_length = tf.norm(column, axis=1, keepdims=True)
                if number:
                    for _ in range(2):
                        parts = tf.reduce_sum(done * column, 1, keepdims=True)
                        column -= tf.reduce_sum(done * parts, 2, keepdims=True)
                length = tf.norm(column, axis=1, keepdims=True)
                unit = column / (length + self.orthogonalization_epsilon)
                done = tf.concat([done, tf.where(length <= _ROUNDING * original_length, 0.0, unit)], 2)
            for index, result in zip(indices, tf.unstack(done), strict=True):
                results[index] = result
        return results
