"""Cuts the batches of a worker's own dataset into parts for its replicas."""

from __future__ import annotations

import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.replicas import batch_splitting


def split_own_batches(
    dataset: tf.data.Dataset, size: int | None, workers: int, replicas: int, pieces: int
) -> tf.data.Dataset:
    """Cuts each batch of the global size into pieces, one for a step, and each piece into even parts for the worker's replicas.

    A piece has a batch's size by the number of workers, rounded up; the last piece of a batch may have fewer rows. Pieces never
    join rows of two batches, which may be padded to different lengths. The parts, of which some may be empty, come as successive elements.

    `size` is the number of rows of full batches (None: of each batch), `pieces` that of pieces of the whole dataset, or a negative cardinality.
    """

    @tf.autograph.experimental.do_not_convert
    def split(*element: Structure) -> tf.data.Dataset:
        batch = batch_splitting.batch_of(dataset, element)
        rows = tf.cast(batch_splitting.num_rows(batch), tf.int64)
        full = rows if size is None else tf.constant(size, tf.int64)
        piece = tf.maximum(-(-full // workers), 1)

        @tf.autograph.experimental.do_not_convert
        def part(number: tf.Tensor) -> Structure:
            begin, which = number // replicas * piece, number % replicas
            own_rows = tf.minimum(piece, rows - begin)
            begin += which * (own_rows // replicas) + tf.minimum(which, own_rows % replicas)
            return batch_splitting.rows_of(
                batch, begin, begin + own_rows // replicas + tf.cast(which < own_rows % replicas, tf.int64)
            )

        return tf.data.Dataset.range(-(-rows // piece) * replicas).map(part)

    parts = dataset.flat_map(split)
    if pieces != tf.data.UNKNOWN_CARDINALITY:
        parts = parts.apply(tf.data.experimental.assert_cardinality(pieces if pieces < 0 else pieces * replicas))
    return parts.prefetch(replicas)
