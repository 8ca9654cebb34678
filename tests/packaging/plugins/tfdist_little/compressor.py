"""Float16 on the wire."""

import dataclasses

import tensorflow as tf

from tfdist.collectives.requests import AllReduce, ReduceResult
from tfdist.compression import Compressor, option


@dataclasses.dataclass(frozen=True)
class Float16(Compressor):
    """Sums in float16, multiplied by `factor`."""

    factor: float = option(1.0, "more than 0", lambda factor: factor > 0)

    def exchange(self, values, states, member):
        low = [tf.cast(value * self.factor, tf.float16) for value in values]
        sent = [tf.cast(value, tf.float32) / self.factor for value in low]
        totals = yield AllReduce(low)
        return ReduceResult([tf.cast(total, tf.float32) / self.factor for total in totals], sent, list(states))
