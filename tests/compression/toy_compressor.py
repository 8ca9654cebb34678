"""A compressor of a user's own, in one file: a configuration names it, and sets its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.requests import AllReduce, Exchange, RankContext, ReduceResult
from tfdist.compression import Compressor, option


@dataclasses.dataclass(frozen=True)
class Sign(Compressor):
    """Sends the sign of each number, times `scale`.

    Args:
        scale: The factor.
        width: Bits on the wire.
        symmetric: Whether zero is sent as zero; otherwise as one.
    """

    scale: float = option(1.0, "more than 0", lambda scale: scale > 0)
    width: int = 16
    symmetric: bool = True

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        signs = [tf.sign(value) if self.symmetric else tf.where(value < 0, -1.0, 1.0) for value in values]
        dtype = tf.float32 if self.width == 32 else tf.bfloat16
        totals = yield AllReduce([tf.cast(sign, dtype) for sign in signs])
        sums = [tf.cast(total, tf.float32) * self.scale for total in totals]
        return ReduceResult(sums, [sign * self.scale for sign in signs], list(states))
