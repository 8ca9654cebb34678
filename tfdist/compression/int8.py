"""Compression to integers of 8 bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.requests import AllGather, AllReduce, AllToAll, Exchange, RankContext, ReduceResult
from tfdist.compression.base import Compressor, RowCodec
from tfdist.compression.compiled import compiled
from tfdist.config.compression import Int8Options
from tfdist.errors import ConfigError

_Blocks = Generator[Any, Any, tuple[list[tf.Tensor], list[tf.Tensor]]]
_LANES = 4  # 8-bit values in an int32
_LEVELS = 127
_SMALLEST = 2.0**-113  # blocks with a smaller maximum are sent as zeros: the inverse of their scale would overflow
_SCALE_MASK = ~0x7F  # the bits of a float32 that a scale keeps
_NAN = 0x7FC00000  # the bits of a float32


class _Int8RowCodec(RowCodec):
    """An encoding with a scale for each row. Not compiled, because the number of rows changes from step to step."""

    def pack(self, rows: tf.Tensor) -> tf.Tensor:
        return _pack_blocks(tf.pad(rows, [[0, 0], [0, -rows.shape[1] % _LANES]]))

    def unpack(self, packed: tf.Tensor, width: int) -> tf.Tensor:
        return _unpack_blocks(packed)[:, :width]


@dataclasses.dataclass(frozen=True)
class Int8(Int8Options, Compressor):
    """Compression to 8 bits, block by block: q = round(x / s), s = max|x| / 127 (Dettmers, arXiv:2110.02861).

    With `transport="two_shot"` each rank sums one part of all ranks' values and sends its sum, rounded again, to all ranks. So
    8 bits per value and a scale per block are sent twice, whatever the number of ranks. The error of the second rounding is
    attributed, in `contributions`, to the rank that made it. With `transport="sum"` all ranks use the same scales and fewer
    levels, so that one int32 addition adds four values. There is no second rounding, but levels are 1 / (127 // ranks) of the
    largest value.

    Its arguments are the fields of `Int8Options`.

    Examples:
        >>> from tfdist.compression import Int8
        >>> Int8(block=128).block
        128
    """

    @property
    def row_codec(self) -> RowCodec:
        return _Int8RowCodec()

    @property
    def granularity(self) -> int:
        return self.block

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        exchange = self._two_shot if self.transport == "two_shot" else self._sum
        totals, sent = yield from exchange([self._blocks(value) for value in values], member)
        return ReduceResult(list(map(_values, totals, values)), list(map(_values, sent, values)), list(states))

    def _blocks(self, value: tf.Tensor) -> tf.Tensor:
        """Returns `[blocks, block]`; the last block is padded with zeros."""
        numbers = tf.reshape(value, [-1])
        padding = -numbers.shape[0] % self.block
        if padding:
            numbers = tf.pad(numbers, [[0, padding]])
        return tf.reshape(numbers, [-1, self.block])

    def _two_shot(self, values: Sequence[tf.Tensor], member: RankContext) -> _Blocks:
        packed = [_pack(blocks) for blocks in values]
        counts = [blocks.shape[0] for blocks in values]
        padding = -sum(counts) % member.size
        rows = tf.pad(tf.concat(packed, 0), [[0, padding], [0, 0]])
        rows = tf.reshape(rows, [member.size, -1, packed[0].shape[1]])
        received = yield AllToAll(rows)
        rounded = _sum_and_pack(received)
        gathered = yield AllGather(rounded)
        totals = _unpack(tf.reshape(gathered, [-1, rounded.shape[1]]))
        # A separate compiled function, so that TensorFlow prunes it from graphs that do not use the contributions.
        sent = _contribution(rows, _error(received, rounded), tf.one_hot(member.rank, member.size))

        def of_values(blocks: tf.Tensor) -> list[tf.Tensor]:
            return tf.split(tf.reshape(blocks, [-1, self.block]), [*counts, padding])[:-1]

        return of_values(totals), of_values(sent)

    def _sum(self, values: Sequence[tf.Tensor], member: RankContext) -> _Blocks:
        # Each lane holds the sum of all ranks' levels, 0 to 254, so that no lane carries into the next one.
        levels = _LEVELS // member.size
        if not levels:
            raise ConfigError(
                f"Int8(transport='sum') is for {_LEVELS} ranks at most. Received: {member.size}; use 'two_shot'."
            )
        largest = yield AllReduce([tf.reduce_max(tf.abs(blocks), -1, keepdims=True) for blocks in values], largest=True)
        scales = [x / levels for x in largest]
        rounded = [tf.round(blocks * _inverse(scale)) for blocks, scale in zip(values, scales, strict=True)]
        lanes = yield AllReduce([_lanes(tf.cast(x + levels, tf.uint8)) for x in rounded])
        totals = []
        for packed, scale in zip(lanes, scales, strict=True):
            total = tf.reshape(tf.bitcast(packed, tf.uint8), [-1, self.block])
            totals.append((tf.cast(total, tf.float32) - levels * member.size) * scale)
        return totals, [x * scale for x, scale in zip(rounded, scales, strict=True)]


def _values(blocks: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns the numbers of blocks, without the padding, in the shape of `value`."""
    return tf.reshape(tf.reshape(blocks, [-1])[: value.shape.num_elements()], value.shape)


def _pack_blocks(numbers: tf.Tensor) -> tf.Tensor:
    """Encodes `[..., blocks, block]` float32 as `[..., blocks, 1 + block / 4]` int32: the scale, then the numbers."""
    magnitudes = tf.where(tf.math.is_nan(numbers), math.inf, tf.abs(numbers))  # XLA's maximum ignores NaN
    largest = tf.reduce_max(magnitudes, -1, keepdims=True)
    is_sent = largest > _SMALLEST
    rounded = tf.round(numbers * tf.where(is_sent, _LEVELS / largest, 0))
    # 17 significant bits, so that the product of 8 bits and the scale is exact, whether or not XLA fuses it with an addition.
    scale = tf.bitwise.bitwise_and(tf.bitcast(tf.where(is_sent, largest * (1 / _LEVELS), 0), tf.int32), _SCALE_MASK)
    scale = tf.where(largest < math.inf, scale, _NAN)  # the cast of infinity to 8 bits depends on the implementation
    return tf.concat([scale, _lanes(tf.cast(rounded, tf.int8))], -1)


def _lanes(rounded: tf.Tensor) -> tf.Tensor:
    """Returns `[..., block / 4]` int32 of `[..., block]` 8-bit values."""
    lanes = tf.concat([tf.shape(rounded)[:-1], [rounded.shape[-1] // _LANES, _LANES]], 0)
    return tf.bitcast(tf.reshape(rounded, lanes), tf.int32)


def _unpack_blocks(packed: tf.Tensor) -> tf.Tensor:
    """Returns the input of `_pack_blocks`, up to the loss of the quantization."""
    scale = tf.bitcast(packed[..., :1], tf.float32)
    block = (packed.shape[-1] - 1) * _LANES
    rounded = tf.reshape(tf.bitcast(packed[..., 1:], tf.int8), tf.concat([tf.shape(packed)[:-1], [block]], 0))
    return tf.cast(rounded, tf.float32) * scale


def _sum(packed: tf.Tensor) -> tf.Tensor:
    """Returns `[blocks, block]`, the sum of `[size, blocks, words]`, added in rank order both with and without XLA."""
    return tf.add_n(tf.unstack(_unpack_blocks(packed)))


_pack, _unpack = compiled(_pack_blocks), compiled(_unpack_blocks)
_sum_and_pack = compiled(lambda received: _pack_blocks(_sum(received)))
_error = compiled(lambda received, rounded: _sum(received) - _unpack_blocks(rounded))
_contribution = compiled(lambda rows, error, mask: _unpack_blocks(rows) - mask[:, tf.newaxis, tf.newaxis] * error)


def _inverse(scale: tf.Tensor) -> tf.Tensor:
    """Returns 1 / scale, or 0 where that would overflow: such a block is sent as zeros."""
    return tf.where(scale > 2.0**-120, 1 / scale, 0)
