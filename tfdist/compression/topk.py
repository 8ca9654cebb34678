"""The largest numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.compression.base import Compressor
from tfdist.compression.exchange import AllGather, Exchange, Member, Reduced, flat, like

_NOWHERE = 2**30  # past the end
_SMALLEST = 2.0**-126  # what is less is zero to TensorFlow


class TopK(Compressor):
    """Sends of each gradient the numbers that are largest by magnitude, with their places (Aji and Heafield,
    arXiv:1704.05021; Stich et al., arXiv:1809.07599).

    Biased: it wants error feedback around it. The others get 64 bits for each number sent, from each rank: with N ranks it
    takes fewer bytes than an all-reduce of 16 bits if `compress_ratio` is less than 1 / (2 N).

    Args:
        compress_ratio: The share of each gradient's numbers to send, at least one.
        selection: `"exact"`; or `"sampled"`, several times as fast: those above a threshold that is taken from some of the
            numbers, other ones at each step, and at most the share.
        samples: How many numbers `"sampled"` looks at in each gradient.
    """

    suits_adaptive = False  # their second moments become those of rare, large numbers

    def __init__(self, compress_ratio: float = 0.01, selection: str = "sampled", samples: int = 4096):
        self._ratio = compress_ratio
        self._sampled = selection == "sampled"
        self._samples = samples

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: Member
    ) -> Exchange:
        chosen, offset = [], 0
        for value in values:
            numbers = tf.reshape(value, [-1])
            chosen.append(self._choose(numbers, member.step) + offset)
            offset += numbers.shape.num_elements()
        places, numbers = tf.concat(chosen, 0), flat(values)
        largest = tf.gather(tf.pad(numbers, [[0, 1]]), tf.minimum(places, offset))
        gathered = yield AllGather(tf.stack([places, tf.bitcast(largest, tf.int32)]))
        total = tf.zeros(offset + 1)
        for rank in range(member.size):  # one after another: the same sums on all ranks
            total = _add(total, gathered[rank, 0], tf.bitcast(gathered[rank, 1], tf.float32))
        sent = _add(tf.zeros(offset + 1), places, largest)
        return Reduced(like(total[:-1], values), like(sent[:-1], values), list(states))

    def _choose(self, numbers: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Returns `[k]` int32 places."""
        count = numbers.shape.num_elements()
        k = math.ceil(self._ratio * count)
        sizes = tf.abs(numbers)
        if not self._sampled or count <= self._samples:
            return tf.math.top_k(sizes, k, sorted=False).indices
        stride = count // self._samples
        sample = sizes[tf.cast(step % stride, tf.int32) :: stride]
        threshold = tf.math.top_k(sample, math.ceil(self._ratio * self._samples)).values[-1]
        places = tf.cast(tf.where(sizes >= tf.maximum(threshold, _SMALLEST))[:, 0], tf.int32)
        # Of too many, others are left out at each step; of too few, the rest of the message is past the end.
        first = step * k % tf.maximum(tf.size(places, tf.int64), 1)
        places = tf.roll(places, -first, 0)[:k]
        return tf.ensure_shape(tf.pad(places, [[0, k - tf.size(places)]], constant_values=_NOWHERE), [k])


def _add(total: tf.Tensor, places: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_add(total, tf.minimum(places, total.shape[0] - 1)[:, tf.newaxis], numbers)
