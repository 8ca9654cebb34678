"""Gradients as products of two thin matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.requests import AllReduce, Exchange, Member, Reduced
from tfdist.compression.base import Compressor, Slot

_NOTHING = 1e-5  # of a column's length: float32 has no more digits


@dataclasses.dataclass(frozen=True)
class PowerSGD(Compressor):
    """Sums a gradient M [p, q] as P [p, r] Q [q, r]^T, by one power iteration a step (Vogels et al., arXiv:1905.13727).

    P = orthogonal(sum M Q), then Q = mean M^T P, two dependent all-reduces; the next step begins with this Q. A kernel's
    last axis is q and all others are p, which for Keras' layouts makes the thinnest matrices. Biased: it wants error
    feedback around it. Arguments as torch's `PowerSGDState`.

    Args:
        matrix_approximation_rank: r.
        min_compression_rate: Matrices whose numbers this does not make so many times fewer are summed as they are.
        warm_start: Whether to begin with the Q of the step before, which is then state, the same on all ranks. Otherwise
            with random numbers.
        orthogonalization_epsilon: Added to a column's length, of a matrix whose largest number is 1, before dividing by it.
        random_seed: Of the first Q.
    """

    matrix_approximation_rank: int = 4
    min_compression_rate: float = 2.0
    warm_start: bool = True
    orthogonalization_epsilon: float = 1e-8
    random_seed: int = 0

    def slots(self, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        thin = self._thin(shape)
        return (Slot("q", thin, True, self._random),) if thin and self.warm_start else ()

    def _thin(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Returns the shape of Q, or None where it does not pay."""
        if len(shape) < 2 or 0 in shape:
            return None
        q = int(shape[-1])
        p = math.prod(shape) // q
        r = min(self.matrix_approximation_rank, p, q)
        return (q, r) if (p + q) * r * self.min_compression_rate <= p * q else None

    def _random(self, shape: tuple[int, ...], number: int, step: Any = 0) -> tf.Tensor:
        return tf.random.stateless_normal(shape, [self.random_seed + number, step])

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: Member
    ) -> Exchange:
        thin = [self._thin(value.shape) for value in values]
        low = [place for place, shape in enumerate(thin) if shape]
        rest = [place for place, shape in enumerate(thin) if not shape]
        matrices = [tf.reshape(values[place], [-1, values[place].shape[-1]]) for place in low]
        before = [
            states[place][0] if self.warm_start else self._random(thin[place] or (), place, member.step)
            for place in low
        ]
        sums = yield AllReduce([values[p] for p in rest] + [m @ q for m, q in zip(matrices, before, strict=True)])
        ps = self._orthogonal(sums[len(rest) :])
        own = [tf.matmul(m, p, transpose_a=True) for m, p in zip(matrices, ps, strict=True)]
        qs = yield AllReduce(own)

        totals, sent, after = list(values), list(values), list(states)
        for place, total in zip(rest, sums, strict=False):
            totals[place] = total
        for place, p, q, mine, old in zip(low, ps, qs, own, before, strict=True):
            mean = q / member.size
            # The sum is the same if each rank counts the mean's part as its own, as torch does; but then in what it has left,
            # the ranks' differences add up step by step, and its length grows without bounds.
            sent[place] = tf.reshape(tf.matmul(p, mine, transpose_b=True), values[place].shape)
            totals[place] = tf.reshape(tf.matmul(p, q, transpose_b=True), values[place].shape)
            if self.warm_start:  # a column of zeros would stay so for ever
                after[place] = (tf.where(tf.reduce_any(tf.not_equal(mean, 0), 0), mean, old),)
        return Reduced(totals, sent, after)

    def _orthogonal(self, matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns orthonormal columns with the spans of the matrices' (Gram-Schmidt), equal shapes at once.

        A column of which nothing but rounding errors is left becomes zeros. Each is projected twice, as once leaves some of the
        others in it. The sums along an axis are no matrix products, which TensorFlow cuts into as many parts as it has threads: the
        result must be the same to the bit on workers with other numbers of them.
        """
        results = list(matrices)
        for shape in dict.fromkeys(tuple(matrix.shape) for matrix in matrices):
            places = [place for place, matrix in enumerate(matrices) if tuple(matrix.shape) == shape]
            given = tf.stack([matrices[place] for place in places])
            given = tf.math.divide_no_nan(given, tf.reduce_max(tf.abs(given), [1, 2], keepdims=True))
            done = given[:, :, :0]
            for number in range(shape[1]):
                whole = column = given[:, :, number : number + 1]
                for _ in range(2 if number else 0):
                    parts = tf.reduce_sum(done * column, 1, keepdims=True)
                    column -= tf.reduce_sum(done * parts, 2, keepdims=True)
                length, before = (tf.norm(each, axis=1, keepdims=True) for each in (column, whole))
                column = tf.where(length <= _NOTHING * before, 0.0, column / (length + self.orthogonalization_epsilon))
                done = tf.concat([done, column], 2)
            for place, result in zip(places, tf.unstack(done), strict=True):
                results[place] = result
        return results
