"""The split of a worker's own batches into parts for its replicas."""

from __future__ import annotations

import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.replicas import batch_splitting


def split_own_batches(
    dataset: tf.data.Dataset, size: int | None, workers: int, replicas: int, pieces: int
) -> tf.data.Dataset:
    """Splits each batch of the global size into pieces, one per step, and each piece into even parts for the worker's replicas.

    A piece has the batch size divided by the number of workers, rounded up; the last piece of a batch may have fewer rows. No
    piece joins rows of two batches, which may be padded to different lengths. The parts, some of which may be empty, are successive
    elements of the result.

    `size` is the number of rows in a full batch; None means each batch's own. `pieces` is the number of pieces in the dataset, or a
    negative cardinality.
    """

    @tf.autograph.experimental.do_not_convert
    def split(*element: Structure) -> tf.data.Dataset:
        batch = batch_splitting.batch_of(dataset, element)
        rows = tf.cast(batch_splitting.num_rows(batch), tf.int64)
        full = rows if size is None else tf.constant(size, tf.int64)
        piece = tf.maximum(-(-full // workers), 1)

        @tf.autograph.experimental.do_not_convert
        def part(number: tf.Tensor) -> Structure:
            begin, replica = number // replicas * piece, number % replicas
            own_rows = tf.minimum(piece, rows - begin)
            begin += replica * (own_rows // replicas) + tf.minimum(replica, own_rows % replicas)
            return batch_splitting.rows_of(
                batch, begin, begin + own_rows // replicas + tf.cast(replica < own_rows % replicas, tf.int64)
            )

        return tf.data.Dataset.range(-(-rows // piece) * replicas).map(part)

    parts = dataset.flat_map(split)
    if pieces != tf.data.UNKNOWN_CARDINALITY:
        parts = parts.apply(tf.data.experimental.assert_cardinality(pieces if pieces < 0 else pieces * replicas))
    return parts.prefetch(replicas)
