"""Eight bits for each number."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.base import Compressor, Rows
from tfdist.compression.exchange import AllGather, AllReduce, AllToAll, Exchange, Member, Reduced, flat, like

_LANES = 4  # numbers of 8 bits in an int32
_LEVELS = 127


class _Rows(Rows):
    """With a scale for each row."""

    def pack(self, rows: tf.Tensor) -> tf.Tensor:
        return _pack(tf.pad(rows, [[0, 0], [0, -rows.shape[1] % _LANES]]))

    def unpack(self, packed: tf.Tensor, width: int) -> tf.Tensor:
        return _unpack(packed)[:, :width]


class Int8(Compressor):
    """Rounds to 8 bits, block by block: q = round(x / s), s = max|x| / 127 (Dettmers, arXiv:2110.02861).

    With `transport="two_shot"` each rank sums one part of all ranks' numbers and sends its sum, rounded again, to all: 8 bits
    and a scale for each block, twice, however many ranks there are. Of the second rounding's error the rank that made it
    is held to account, in `sent`. With `transport="sum"` all ranks round alike, to fewer levels, so that four numbers
    are added in one int32: no second rounding, but levels of 1 / (127 // ranks) of the largest number.

    Args:
        block: Numbers that share a scale, a power of two, at least 4.
        transport: `"two_shot"` or `"sum"`.
    """

    rows = _Rows()

    def __init__(self, block: int = 256, transport: str = "two_shot"):
        self._block = block
        self._transport = transport

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: Member
    ) -> Exchange:
        numbers = flat(values)
        count = numbers.shape.num_elements()
        parts = member.size if self._transport == "two_shot" else 1
        blocks = -(-count // (self._block * parts)) * parts
        numbers = tf.reshape(tf.pad(numbers, [[0, blocks * self._block - count]]), [parts, -1, self._block])
        exchange = self._two_shot if self._transport == "two_shot" else self._sum
        total, sent = yield from exchange(numbers, member)
        totals, sents = (like(tf.reshape(each, [-1])[:count], values) for each in (total, sent))
        return Reduced(totals, sents, list(states))

    def _two_shot(self, numbers: tf.Tensor, member: Member) -> Generator[Any, Any, tuple[tf.Tensor, tf.Tensor]]:
        mine = _pack(numbers)
        received = yield AllToAll(mine)
        part = tf.reduce_sum(_unpack(received), 0)
        rounded = _pack(part)
        total = _unpack((yield AllGather(rounded)))
        error = part - _unpack(rounded)
        sent = _unpack(mine) - tf.one_hot(member.rank, member.size)[:, None, None] * error
        return total, sent

    def _sum(self, numbers: tf.Tensor, member: Member) -> Generator[Any, Any, tuple[tf.Tensor, tf.Tensor]]:
        # Each lane holds the sum of all ranks' levels, 0 to 254, so that none carries into the next.
        levels = _LEVELS // member.size
        largest = (yield AllReduce([tf.reduce_max(tf.abs(numbers), -1, keepdims=True)], largest=True))[0]
        scale = largest / levels
        rounded = tf.round(numbers * _inverse(scale))
        lanes = tf.bitcast(tf.reshape(tf.cast(rounded + levels, tf.uint8), [*numbers.shape[:-1], -1, _LANES]), tf.int32)
        total = tf.bitcast((yield AllReduce([lanes]))[0], tf.uint8)
        total = tf.cast(tf.reshape(total, numbers.shape), tf.float32) - levels * member.size
        return total * scale, rounded * scale


def _pack(numbers: tf.Tensor) -> tf.Tensor:
    """Returns `[..., blocks, 1 + block / 4]` int32, scale and numbers, of `[..., blocks, block]` float32."""
    scale = tf.reduce_max(tf.abs(numbers), -1, keepdims=True) / _LEVELS
    rounded = tf.cast(tf.round(numbers * _inverse(scale)), tf.int8)
    lanes = tf.concat([tf.shape(numbers)[:-1], [numbers.shape[-1] // _LANES, _LANES]], 0)
    words = tf.bitcast(tf.reshape(rounded, lanes), tf.int32)
    return tf.concat([tf.bitcast(scale, tf.int32), words], -1)


def _unpack(packed: tf.Tensor) -> tf.Tensor:
    scale = tf.bitcast(packed[..., :1], tf.float32)
    block = (packed.shape[-1] - 1) * _LANES
    rounded = tf.reshape(tf.bitcast(packed[..., 1:], tf.int8), tf.concat([tf.shape(packed)[:-1], [block]], 0))
    return tf.cast(rounded, tf.float32) * scale


def _inverse(scale: tf.Tensor) -> tf.Tensor:
    """Returns 1 / scale, and 0 where that would overflow: such a block counts as zeros."""
    return tf.where(scale > 2.0**-120, 1 / scale, 0)
