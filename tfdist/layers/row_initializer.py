"""The initial values of a table, a function of the seed, the row and the column: equal for any number of shards.

A shard draws its own rows. Keras' initializers draw a whole array from one state, so that a row would depend on all rows before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigError

_initializers = keras.initializers
_EQUAL_ROWS = (_initializers.Zeros, _initializers.Ones, _initializers.Constant)
_RANDOM = (_initializers.RandomUniform, _initializers.RandomNormal, _initializers.TruncatedNormal)
CHUNK = 2**18  # elements that are drawn at once: their hashes take 8 bytes each
# A multiple of a CPU's largest vector: Eigen may round functions differently in elements that do not fill a vector.
_ALIGNMENT = 32
_BELOW_TRUNCATION = 0.02275013194817921  # the probability of a normal number below -2
# SplitMix64 (Steele, Lea and Flood, 2014).
_INCREMENT = 0x9E3779B97F4A7C15
_MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class RowInitializer:
    """Draws the initial rows of a table's shards. Raises ConfigError for an initializer that needs the whole table."""

    def __init__(self, initializer: keras.initializers.Initializer, seed: int | None, layer: str):
        self._initializer = initializer
        if type(initializer) in _EQUAL_ROWS:
            return
        if type(initializer) not in _RANDOM:
            names = ", ".join(kind.__name__ for kind in (*_RANDOM, *_EQUAL_ROWS))
            raise ConfigError(
                f"embeddings_initializer of {layer} must draw each row separately: use one of {names}, or give the table as "
                f"weights=. Received: {type(initializer).__name__}."
            )
        if seed is None:
            seed = initializer.seed  # drawn by Keras from its global seed, if the user gave none
        if not isinstance(seed, int):
            raise ConfigError(f"The seed of {layer} must be an int. Received: {type(seed).__name__}.")
        self._offset = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "little")

    def draw(self, shard: int, shards: int, shape: Sequence[int], dtype: Any = None) -> tf.Tensor:
        """Returns the rows of one of a table's shards."""
        if type(self._initializer) in _EQUAL_ROWS:
            return self._initializer(shape, dtype)
        count, columns = shape
        step = -(-max(1, CHUNK // columns) // _ALIGNMENT) * _ALIGNMENT
        # Each chunk is written into the array: to join chunks would take its memory twice, which a server may not have.
        values = tf.raw_ops.Empty(shape=[count, columns], dtype=dtype or tf.float32)
        for begin in range(0, count, step):
            drawn = min(step, -(-(count - begin) // _ALIGNMENT) * _ALIGNMENT)
            rows = tf.range(begin, begin + drawn, dtype=tf.int64) * shards + shard
            chunk = tf.cast(self._rows(rows, columns)[: count - begin], values.dtype)
            places = tf.range(begin, min(begin + step, count))
            values = tf.raw_ops.InplaceUpdate(x=values, i=places, v=chunk)
        return values

    def _rows(self, rows: tf.Tensor, columns: int) -> tf.Tensor:
        numbers = self._uniform(rows, columns)
        config = self._initializer.get_config()
        if isinstance(self._initializer, keras.initializers.RandomUniform):
            return config["minval"] + numbers * (config["maxval"] - config["minval"])
        if isinstance(self._initializer, keras.initializers.TruncatedNormal):
            numbers = _BELOW_TRUNCATION + numbers * (1 - 2 * _BELOW_TRUNCATION)
        return config["mean"] + tf.math.ndtri(numbers) * config["stddev"]

    def _uniform(self, rows: tf.Tensor, columns: int) -> tf.Tensor:
        """Returns numbers between 0 and 1, both excluded."""
        elements = tf.cast(rows[:, None] * columns + tf.range(columns, dtype=tf.int64), tf.uint64)
        bits = tf.bitwise.right_shift(_mixed(elements, self._offset), tf.constant(41, tf.uint64))
        # 23 bits and a half are exact in float32.
        return (tf.cast(bits, tf.float32) + 0.5) * 2.0**-23


def _mixed(numbers: tf.Tensor, offset: int) -> tf.Tensor:
    """Returns the hashes of numbers of 64 bits without a sign: SplitMix64."""
    bits = numbers * tf.constant(_INCREMENT, tf.uint64) + tf.constant(offset, tf.uint64)
    for shift, factor in _MIXES:
        bits = _xor_shift(bits, shift) * tf.constant(factor, tf.uint64)
    return _xor_shift(bits, 31)


def _xor_shift(bits: tf.Tensor, shift: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint64)))
