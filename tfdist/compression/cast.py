"""Compression to floats of 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.requests import AllReduce, Exchange, RankContext, ReduceResult
from tfdist.compression.base import Compressor, RowCodec


class _CastRowCodec(RowCodec):
    def __init__(self, dtype: tf.DType):
        self._dtype = dtype

    def pack(self, rows: tf.Tensor) -> tf.Tensor:
        low = tf.cast(tf.pad(rows, [[0, 0], [0, rows.shape[1] % 2]]), self._dtype)
        return tf.bitcast(tf.reshape(low, [-1, low.shape[1] // 2, 2]), tf.int32)

    def unpack(self, packed: tf.Tensor, width: int) -> tf.Tensor:
        low = tf.reshape(tf.bitcast(packed, self._dtype), [-1, 2 * packed.shape[1]])
        return tf.cast(low[:, :width], tf.float32)


class _Cast(Compressor):
    """Base class of compressors that round to 16 bits before the sum."""

    dtype: tf.DType

    @property
    def row_codec(self) -> RowCodec:
        return _CastRowCodec(self.dtype)

    @property
    def granularity(self) -> int:
        return 1

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        shares = self._shares(member.size)
        low = [tf.cast(value / shares, self.dtype) for value in values]
        totals = yield AllReduce(low)
        as_sent = [tf.cast(value, tf.float32) * shares for value in low]
        return ReduceResult([tf.cast(total, tf.float32) * shares for total in totals], as_sent, list(states))

    def _shares(self, size: int) -> float:
        """Returns the divisor that each rank applies before the sum."""
        return 1.0


class BF16(_Cast):
    """Compression to bfloat16, which has the range of float32 and 8 bits of precision, like torch's `bf16_compress_hook`.

    Examples:
        >>> from tfdist.compression import BF16
        >>> BF16().description
        'BF16()'
    """

    dtype = tf.bfloat16


class FP16(_Cast):
    """Compression to float16, which has 11 bits of precision, like torch's `fp16_compress_hook` and Horovod's `Compression.fp16`.

    Each rank divides by the number of ranks before the sum, because float16 overflows above 65504. A step with a larger value
    is skipped.

    Examples:
        >>> from tfdist.compression import FP16
        >>> FP16().description
        'FP16()'
    """

    dtype = tf.float16

    def _shares(self, size: int) -> float:
        return float(size)
