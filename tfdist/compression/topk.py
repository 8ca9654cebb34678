"""Compression to the largest values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.requests import AllGather, Exchange, RankContext, ReduceResult
from tfdist.compression import compiled
from tfdist.compression.base import Compressor
from tfdist.config.compression import TopKOptions

_SMALLEST = 2.0**-126  # TensorFlow flushes smaller magnitudes to zero
_RUN = 16


@dataclasses.dataclass(frozen=True)
class TopK(TopKOptions, Compressor):
    """Compression to the values of largest magnitude, sent with their indices (Aji and Heafield,
    arXiv:1704.05021; Stich et al., arXiv:1809.07599).

    The sum is biased: wrap the compressor in `ErrorFeedback`. Each rank sends 64 bits per selected value to all other ranks.
    With N ranks this takes fewer bytes than an all-reduce of 16 bits if `compress_ratio` is less than 1 / (2 N).

    Its arguments are the fields of `TopKOptions`.

    Examples:
        >>> from tfdist.compression import TopK
        >>> TopK(compress_ratio=0.02).compress_ratio
        0.02
    """

    @property
    def supports_adaptive_optimizers(self) -> bool:
        return False  # their second moments would be those of rare, large values

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        numbers = [tf.reshape(value, [-1]) for value in values]
        indices = []
        selected = []
        for vector in numbers:
            chosen, num_valid = self._choose(vector, member.step)
            indices.append(chosen)
            # All ranks send k values: zeros in place of missing ones change no sum.
            selected.append(tf.where(tf.range(chosen.shape[0]) < num_valid, tf.gather(vector, chosen), 0))
        message = tf.stack([tf.concat(indices, 0), tf.bitcast(tf.concat(selected, 0), tf.int32)])
        gathered = yield AllGather(message)
        sizes = [v.shape[0] for v in indices]
        all_indices = tf.split(gathered[:, 0], sizes, 1)
        all_values = tf.split(tf.bitcast(gathered[:, 1], tf.float32), sizes, 1)
        sums = list(map(_scatter, all_indices, all_values, values))
        sent = [_scatter(i[tf.newaxis], s[tf.newaxis], v) for i, s, v in zip(indices, selected, values, strict=True)]
        return ReduceResult(sums, sent, list(states))

    def _choose(self, numbers: tf.Tensor, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns `[k]` int32 indices, and the number of valid ones."""
        count = numbers.shape[0]
        k = math.ceil(self.compress_ratio * count)
        if self.selection == "exact" or count <= self.samples:
            return tf.math.top_k(tf.abs(numbers), k, sorted=False).indices, tf.constant(k)
        stride = count // self.samples
        sample = tf.abs(numbers[tf.cast(step % stride, tf.int32) :: stride])
        threshold = tf.math.top_k(sample, math.ceil(self.compress_ratio * self.samples)).values[-1]
        indices = tf.cast(_at_least(numbers, tf.maximum(threshold, _SMALLEST)), tf.int32)
        # If more than k values reach the threshold, drop different ones at each step.
        first = step * k % tf.maximum(tf.size(indices, tf.int64), 1)
        indices = tf.roll(indices, -first, 0)[:k]
        num_selected = tf.size(indices)
        return tf.ensure_shape(tf.pad(indices, [[0, k - num_selected]]), [k]), num_selected


def _at_least(numbers: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Returns the indices, in rising order, of the values whose magnitude is at least `threshold`.

    First selects the few runs that have such values, because `tf.where` takes longer than a comparison.
    """
    count = numbers.shape[0]
    in_runs = count - count % _RUN
    if count < compiled.LEAST:
        return tf.where(tf.abs(numbers) >= threshold)[:, 0]
    runs = tf.where(_any_at_least(numbers, threshold))[:, 0]
    hits = tf.where(tf.abs(tf.gather(tf.reshape(numbers[:in_runs], [-1, _RUN]), runs)) >= threshold)
    tail = tf.where(tf.abs(numbers[in_runs:]) >= threshold)[:, 0]
    return tf.concat([tf.gather(runs, hits[:, 0]) * _RUN + hits[:, 1], tail + in_runs], 0)


@compiled.compiled
def _any_at_least(numbers: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """Returns `[runs]`, True for each complete run that has a value of at least this magnitude."""
    runs = tf.reshape(numbers[: numbers.shape[0] // _RUN * _RUN], [-1, _RUN])
    return tf.reduce_any(tf.abs(runs) >= threshold, 1)


def _scatter(indices: tf.Tensor, values: tf.Tensor, template: tf.Tensor) -> tf.Tensor:
    """Returns the sums of all ranks' values at their indices, added in rank order, so that all ranks compute the same bits."""
    count = template.shape.num_elements()
    if not tf.config.get_visible_devices("GPU"):
        total = tf.math.unsorted_segment_sum(tf.reshape(values, [-1]), tf.reshape(indices, [-1]), count)
    else:  # a GPU adds values of equal indices in any order, so that ranks would drift apart: add rank by rank
        total = tf.zeros([count])
        for rank_indices, rank_values in zip(tf.unstack(indices), tf.unstack(values), strict=True):
            total = tf.tensor_scatter_nd_add(total, rank_indices[:, tf.newaxis], rank_values)
    return tf.reshape(total, template.shape)
