"""`epochs`: a dataset of arrays that is a pure function of (seed, epoch, shard)."""

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
    """Makes an endless dataset of epochs, of which each is a pure function of (seed, epoch).

    Step k of an epoch takes the k-th `global_batch_size` examples of that epoch's order and deals them to the
    replicas in turn, so that any number of workers trains on the same batches. Under parameter servers, where a step is
    one worker's, whole batches are dealt to the workers in turn. The examples that do not fill a last
    batch are left out; which ones they are differs between epochs.

    Args:
        arrays: A structure of arrays `[examples, ...]`.
        context: Which of how many input pipelines this dataset is for.
        global_batch_size: Examples per step over all replicas.
        seed: Orders the examples.
        shuffle: Whether to order them anew in each epoch, or keep their order.
        start_epoch: The first epoch.
        load: Makes a batch of elements of `arrays`, such as images of their file names, in TensorFlow operations.
            Resumed training does not load the elements that it skips.

    Returns:
        A dataset of batches `[global_batch_size / num_replicas, ...]`, in the structure of `arrays`; successive
        elements are for successive replicas of the pipeline. Pass `steps_per_epoch` to `fit` with it.

    Raises:
        ConfigError: The replicas do not divide the batch, or the batch is larger than the data.

    Example:
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
    tensors = [sent_arrays.cut(array) for array in tf.nest.flatten(arrays)]

    @tf.autograph.experimental.do_not_convert
    def order(epoch: tf.Tensor) -> tf.data.Dataset:
        indices = tf.range(size, dtype=tf.int64)
        if shuffle:
            indices = tf.random.experimental.stateless_shuffle(indices, seed=[seed, epoch])
        by_batch = tf.reshape(indices[: steps * global_batch_size], [-1, batch_size])
        # In turn to pipelines, as many in a row as one has replicas.
        turns = tf.range(steps * replicas, dtype=tf.int64) + epoch * steps * replicas
        is_local = turns // max(replicas // pipelines, 1) % pipelines == context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices(tf.boolean_mask(by_batch, is_local))

    def batch(indices: tf.Tensor) -> Structure:
        taken = tf.nest.pack_sequence_as(arrays, [sent_arrays.gather(array, indices) for array in tensors])
        return load(taken) if load else taken

    if not load:  # AutoGraph takes half a second when it is first used
        batch = tf.autograph.experimental.do_not_convert(batch)

    def starting_at(element: int) -> tf.data.Dataset:
        # An epoch has as many elements as any other where all pipelines have the same.
        whole = element // (steps * replicas // pipelines) if replicas % pipelines == 0 else 0
        dataset = tf.data.Dataset.counter(start_epoch + whole).flat_map(order)
        dataset = dataset.skip(element - whole * (steps * replicas // pipelines))
        dataset = dataset.map(batch, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        # Known to be endless, or TensorFlow asks all workers before each step whether they have data left.
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        dataset = tf_internals.without_autotuning(dataset.prefetch(tf.data.AUTOTUNE))
        setattr(dataset, STARTING_AT, starting_at)
        return dataset

    return starting_at(0)


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns how many examples are in a batch of a dataset, as its outermost `batch` says; None where it is not told."""
    sizes = map(tf_internals.own_batch_size, walk(dataset))
    size = next((size_of_spec for size_of_spec in sizes if size_of_spec is not None), None)
    return None if size is None else int(size)
