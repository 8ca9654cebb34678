"""Gradients as products of two thin matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.requests import AllReduce, Exchange, RankContext, ReduceResult
from tfdist.compression.base import Compressor, StateSpec
from tfdist.config.compression import PowerSGDOptions

_NOTHING = 1e-5  # of a column's length: float32 has no more digits


@dataclasses.dataclass(frozen=True)
class PowerSGD(PowerSGDOptions, Compressor):
    """Sums a gradient M [p, q] as P [p, r] Q [q, r]^T, by one power iteration a step (Vogels et al., arXiv:1905.13727).

    P = orthogonal(sum M Q), then Q = mean M^T P, two dependent all-reduces; the next step begins with this Q. A kernel's
    last axis is q and all others are p, which for Keras' layouts makes the thinnest matrices. Biased: it wants error
    feedback around it.

    Its arguments are the fields of `PowerSGDOptions`.

    Examples:
        >>> from tfdist.compression import PowerSGD
        >>> PowerSGD(matrix_approximation_rank=2).matrix_approximation_rank
        2
    """

    def state_specs(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        q_shape = self._q_shape(shape)
        return (StateSpec("q", q_shape, True, self._random),) if q_shape and self.warm_start else ()

    def _q_shape(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Returns the shape of Q, or None where it does not pay."""
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
        previous_q = [
            states[index][0] if self.warm_start else self._random(q_shapes[index] or (), index, member.step)
            for index in compressible
        ]
        sums = yield AllReduce(
            [values[p] for p in uncompressed] + [m @ q for m, q in zip(matrices, previous_q, strict=True)]
        )
        p_matrices = self._orthogonal(sums[len(uncompressed) :])
        local_q = [tf.matmul(m, p, transpose_a=True) for m, p in zip(matrices, p_matrices, strict=True)]
        q_matrices = yield AllReduce(local_q)

        totals, contributions, new_states = list(values), list(values), list(states)
        for index, total in zip(uncompressed, sums, strict=False):
            totals[index] = total
        for index, p, q, rank_q, old in zip(compressible, p_matrices, q_matrices, local_q, previous_q, strict=True):
            mean = q / member.size
            # The sum is the same if each rank counts the mean's part as its own, as torch does; but then in what it has left,
            # the ranks' differences add up step by step, and its length grows without bounds.
            contributions[index] = tf.reshape(tf.matmul(p, rank_q, transpose_b=True), values[index].shape)
            totals[index] = tf.reshape(tf.matmul(p, q, transpose_b=True), values[index].shape)
            if self.warm_start:  # a column of zeros would stay so without limit
                new_states[index] = (tf.where(tf.reduce_any(tf.not_equal(mean, 0), 0), mean, old),)
        return ReduceResult(totals, contributions, new_states)

    def _orthogonal(self, matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns orthonormal columns with the spans of the matrices' (Gram-Schmidt), equal shapes at once.

        A column of which nothing but rounding errors is left becomes zeros. Each is projected twice, as once leaves some of the
        others in it. The sums along an axis are no matrix products, which TensorFlow cuts into as many parts as it has threads: the
        result must be the same to the bit on workers with other numbers of them.
        """
        results = list(matrices)
        for shape in dict.fromkeys(tuple(matrix.shape) for matrix in matrices):
            places = [place for place, matrix in enumerate(matrices) if tuple(matrix.shape) == shape]
            stacked = tf.stack([matrices[place] for place in places])
            stacked = tf.math.divide_no_nan(stacked, tf.reduce_max(tf.abs(stacked), [1, 2], keepdims=True))
            done = stacked[:, :, :0]
            for number in range(shape[1]):
                whole = column = stacked[:, :, number : number + 1]
                for _ in range(2 if number else 0):
                    parts = tf.reduce_sum(done * column, 1, keepdims=True)
                    column -= tf.reduce_sum(done * parts, 2, keepdims=True)
                length, before = (tf.norm(vectors, axis=1, keepdims=True) for vectors in (column, whole))
                column = tf.where(length <= _NOTHING * before, 0.0, column / (length + self.orthogonalization_epsilon))
                done = tf.concat([done, column], 2)
            for place, result in zip(places, tf.unstack(done), strict=True):
                results[place] = result
        return results
