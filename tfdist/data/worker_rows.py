"""Separate data of each worker: `own_rows`, and datasets whose options set `AutoShardPolicy.OFF`."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.aliases import Data
from tfdist.compat import tf_internals
from tfdist.compat.keras_loops import ArrayDataAdapter
from tfdist.data import arrays

# Transformations that keep the number of elements, by TensorFlow's name.
_KEEP_COUNT = ("Map", "Prefetch", "Options", "Cache", "Shuffle")


@dataclasses.dataclass(frozen=True, eq=False)
class OwnRows:
    """Separate arrays of each worker; created by `own_rows`.

    Attributes:
        x: The inputs, as `fit` takes them.
        y: The targets, or None.
        sample_weight: The weights of the examples, or None.
    """

    x: Data
    y: Data = None
    sample_weight: Data = None

    def dataset(self, batch_size: int, shuffle: bool | str = False) -> tf.data.Dataset:
        """Returns the dataset that Keras creates from the arrays.

        Args:
            batch_size: Examples in a batch of this worker.
            shuffle: As for `fit`.
        """
        adapter = ArrayDataAdapter(self.x, self.y, self.sample_weight, batch_size=batch_size, shuffle=shuffle)
        return adapter.get_tf_dataset().apply(tf.data.experimental.assert_cardinality(adapter.num_batches))


def own_rows(x: Data, y: Data = None, sample_weight: Data = None) -> OwnRows:
    """Declares that each worker passes different arrays, and that all rows of each are used.

        model.fit(tfdist.data.own_rows(x[rank::size], y[rank::size]), batch_size=64, epochs=3)

    Without `own_rows` all workers pass the same arrays, and each trains on its share. With it a step has `batch_size / workers`
    examples of each worker, rounded up. The arrays may have unequal lengths: a worker whose examples have ended contributes no
    examples until the epoch ends. Every example of any worker counts once in losses and metrics. On every rank, `predict` returns
    the outputs for worker 0's examples, then for worker 1's, and so on. In one process it is equal to passing the arrays.

    Args:
        x: The inputs, as the first argument of `fit`: an array, or a list, tuple or dict of arrays.
        y: The targets.
        sample_weight: The weights of the examples.

    Returns:
        The rows; `fit`, `evaluate`, `predict` and `validation_data` accept them in place of `x`, with the `batch_size` and `shuffle` of the call.

    Examples:
        >>> import numpy as np, tfdist.data
        >>> rows = tfdist.data.own_rows(np.ones((3, 4)), np.ones(3))  # the rows of this worker
        >>> rows.x.shape
        (3, 4)
    """
    return OwnRows(x, y, sample_weight)


def is_own(data: Data) -> bool:
    """Returns whether each worker has its own data: `own_rows`, or a dataset that is not to be sharded."""
    if isinstance(data, tf.data.Dataset):
        policy = data.options().experimental_distribute.auto_shard_policy
        return bool(policy == tf.data.experimental.AutoShardPolicy.OFF)
    return isinstance(data, OwnRows)


def count_pieces(dataset: tf.data.Dataset, workers: int) -> int:
    """Returns the number of pieces into which the batches of a dataset are cut, or a negative cardinality.

    A piece has at most the batch size divided by the number of workers, rounded up.
    """
    batches = int(dataset.cardinality())
    size = arrays.batch_size(dataset)
    if batches <= 0 or workers == 1:
        return batches
    while tf_internals.dataset_kind(dataset) in _KEEP_COUNT:
        (dataset,) = tf_internals.inputs(dataset)
    if size is None or tf_internals.own_batch_size(dataset) is None:
        return tf.data.UNKNOWN_CARDINALITY
    rows = int(tf_internals.inputs(dataset)[0].cardinality())
    if rows < 0:
        return tf.data.UNKNOWN_CARDINALITY
    piece = -(-size // workers)
    last = rows - (batches - 1) * size
    return (batches - 1) * -(-size // piece) + -(-min(last, size) // piece)
