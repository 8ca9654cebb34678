"""The split of a worker's own batches into parts for its replicas."""

from __future__ import annotations

import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.replicas import batch_splitting


def split_among_replicas(dataset: tf.data.Dataset, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Splits each batch of a worker into even parts for the worker's replicas."""
    replicas = context.num_replicas_in_sync // context.num_input_pipelines
    if replicas == 1:
        return dataset
    return split_own_batches(dataset, None, 1, replicas, int(dataset.cardinality()))


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
            piece_begin = number // replicas * piece
            own_rows = tf.minimum(piece, rows - piece_begin)
            begin, count = batch_splitting.even_part(number % replicas, own_rows, replicas)
            begin += piece_begin
            return batch_splitting.rows_of(batch, begin, begin + count)

        return tf.data.Dataset.range(-(-rows // piece) * replicas).map(part)

    parts = dataset.flat_map(split)
    return batch_splitting.with_cardinality(parts, pieces, replicas).prefetch(replicas)
