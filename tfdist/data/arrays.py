"""`epochs`: a dataset of arrays whose order is a pure function of the seed and the epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.aliases import Data, Structure
from tfdist.compat import tf_internals
from tfdist.config.validation import per_replica_batch_size
from tfdist.data import sent_arrays
from tfdist.data.graph import walk
from tfdist.data.resume import STARTING_AT
from tfdist.errors import ConfigError


def epochs(
    arrays: Data,
    context: tf.distribute.InputContext,
    global_batch_size: int,
    seed: int,
    *,
    shuffle: bool = True,
    start_epoch: int = 0,
    load: Callable[[Any], Any] | None = None,
) -> tf.data.Dataset:
    """Makes an endless dataset of epochs; the order of each is a pure function of `seed` and the epoch.

    Step k of an epoch trains on the k-th `global_batch_size` examples of that epoch's order, split among the replicas. So any
    number of workers trains on the same batches. Under parameter servers, where each step runs on one worker, the workers
    take whole batches in turn. Examples that do not fill a last batch are dropped; with
    `shuffle`, different examples in each epoch.

    Args:
        arrays: A structure of arrays `[examples, ...]`.
        context: The index of this input pipeline, and the numbers of pipelines and replicas.
        global_batch_size: Examples per step over all replicas.
        seed: The seed of the shuffling.
        shuffle: Whether to shuffle the examples in each epoch; else they keep their order.
        start_epoch: The first epoch.
        load: Makes a batch from the selected rows of `arrays`, such as images from file names, in TensorFlow operations.
            When training resumes, it is not called for the examples that are skipped.

    Returns:
        A dataset of batches `[global_batch_size / num_replicas, ...]`, in the structure of `arrays`. Successive elements are
        for successive replicas of the pipeline. The dataset is endless: pass `steps_per_epoch` to `fit`.

    Raises:
        ConfigError: `global_batch_size` is not divisible by the number of replicas, or larger than the data.

    Examples:
        >>> import numpy as np, tfdist.data
        >>> def data(context):  # trainer.fit(model, data, epochs=2, steps_per_epoch=3)
        ...     return tfdist.data.epochs((np.ones((6, 4)), np.ones(6)), context, global_batch_size=2, seed=1)
    """
    size = int(tf.nest.flatten(arrays)[0].shape[0])
    steps = size // global_batch_size
    if steps == 0:
        raise ConfigError(f"global_batch_size {global_batch_size} is larger than the training data, {size} examples.")
    replicas = context.num_replicas_in_sync
    batch_size = per_replica_batch_size(global_batch_size, replicas)
    pipelines = context.num_input_pipelines
    columns = [sent_arrays.cut(array) for array in tf.nest.flatten(arrays)]

    @tf.autograph.experimental.do_not_convert
    def order(epoch: tf.Tensor) -> tf.data.Dataset:
        indices = tf.range(size, dtype=tf.int64)
        if shuffle:
            indices = tf.random.experimental.stateless_shuffle(indices, seed=[seed, epoch])
        batches = tf.reshape(indices[: steps * global_batch_size], [-1, batch_size])
        # Pipelines take turns; a turn is one batch per replica of the pipeline. `number` counts over all epochs, so that
        # pipelines that cannot divide an epoch evenly take turns with the longer share.
        number = tf.range(steps * replicas, dtype=tf.int64) + epoch * steps * replicas
        is_local = number // max(replicas // pipelines, 1) % pipelines == context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices(tf.boolean_mask(batches, is_local))

    def batch(indices: tf.Tensor) -> Structure:
        rows = tf.nest.pack_sequence_as(arrays, [sent_arrays.gather(column, indices) for column in columns])
        if load:
            return load(rows)
        return rows

    if not load:  # only `load` may need AutoGraph, whose first use takes half a second
        batch = tf.autograph.experimental.do_not_convert(batch)

    def starting_at(element: int) -> tf.data.Dataset:
        # Complete epochs are skipped, and their order is not computed. That needs epochs of equal length, which the pipelines have only if the
        # replicas are divided evenly among them.
        skipped_epochs = 0
        if replicas % pipelines == 0:
            skipped_epochs, element = divmod(element, steps * replicas // pipelines)
        dataset = tf.data.Dataset.counter(start_epoch + skipped_epochs).flat_map(order).skip(element)
        dataset = dataset.map(batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        # Declare the dataset endless: else TensorFlow checks before each step, by a collective, whether all workers have data.
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        dataset = tf_internals.without_autotuning(dataset.prefetch(tf.data.AUTOTUNE))
        setattr(dataset, STARTING_AT, starting_at)
        return dataset

    return starting_at(0)


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the batch size of a dataset's outermost `batch`, or None if it has no `batch`."""
    sizes = map(tf_internals.own_batch_size, walk(dataset))
    return next((int(size) for size in sizes if size is not None), None)
