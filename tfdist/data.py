"""Batch arithmetic, and a dataset that is a pure function of (seed, epoch, shard)."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from tensorflow.python.data.ops.cache_op import CacheDataset
from tensorflow.python.data.ops.random_op import _RandomDataset as RandomDataset
from tensorflow.python.data.ops.repeat_op import _RepeatDataset as RepeatDataset
from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset as ShuffleDataset

from tfdist.check import indivisible
from tfdist.errors import ConfigError

# The private names of TensorFlow's datasets that this file leans on; tests/test_keras_seams.py watches them.
TF_INPUTS = "_inputs"
TF_FUNCTIONS = "_functions"
TF_COUNT = "_count"
TF_BATCH_SIZE = "_batch_size"

_STARTING_AT = "_tfdist_starting_at"  # an attribute of the datasets of `epochs`


def per_replica_batch_size(global_batch_size: int, num_replicas: int) -> int:
    """Returns the examples per step of each replica.

    Raises:
        ConfigError: The replicas do not divide the batch. An uneven split would weigh examples unequally.
    """
    if fault := indivisible(global_batch_size, num_replicas):
        raise ConfigError(fault)
    return global_batch_size // num_replicas


def epochs(
    arrays: Any,
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
        load: Makes a batch of what is taken from `arrays`, such as images of their file names, in TensorFlow operations.
            A training that goes on from a backup does not load again what it leaves out.

    Returns:
        A dataset of batches `[global_batch_size / num_replicas, ...]`, in the structure of `arrays`; successive
        elements are for successive replicas of the pipeline. Pass `steps_per_epoch` to `fit` with it.

    Raises:
        ConfigError: The replicas do not divide the batch, or the batch is larger than the data.
    """
    size = int(tf.nest.flatten(arrays)[0].shape[0])
    steps = size // global_batch_size
    if steps == 0:
        raise ConfigError(f"global_batch_size {global_batch_size} is larger than the training data, {size} examples.")
    replicas = context.num_replicas_in_sync
    batch_size = per_replica_batch_size(global_batch_size, replicas)
    pipelines = context.num_input_pipelines
    with tf.init_scope():  # so that a function that is traced is given them, and does not hold them as constants
        tensors = tf.nest.map_structure(lambda each: each if tf.is_tensor(each) else tf.constant(each), arrays)

    @tf.autograph.experimental.do_not_convert
    def order(epoch: tf.Tensor) -> tf.data.Dataset:
        indices = tf.range(size, dtype=tf.int64)
        if shuffle:
            indices = tf.random.experimental.stateless_shuffle(indices, seed=[seed, epoch])
        dealt = tf.reshape(indices[: steps * global_batch_size], [-1, batch_size])
        # In turn to pipelines, as many in a row as one has replicas.
        turns = tf.range(steps * replicas, dtype=tf.int64) + epoch * steps * replicas
        mine = turns // max(replicas // pipelines, 1) % pipelines == context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices(tf.boolean_mask(dealt, mine))

    def batch(indices: tf.Tensor) -> Any:
        taken = tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), tensors)
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
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
        setattr(dataset, _STARTING_AT, starting_at)
        return dataset

    return starting_at(0)


def skip(dataset: tf.data.Dataset, elements: int) -> tf.data.Dataset:
    """Returns a dataset without its first elements; that of `epochs` is made anew, and does not load them."""
    return getattr(dataset, _STARTING_AT, dataset.skip)(elements)


def replay(dataset: tf.data.Dataset, passes: int, reads: bool = True) -> None:
    """Begins passes over a dataset, so that the next one shuffles as the one after them.

    Args:
        dataset: The dataset.
        passes: How many.
        reads: Whether to read the first one to its end if it filled a cache, which holds the order of that pass.
    """
    if passes and reads and any(isinstance(each, CacheDataset) for each in walk(dataset)):
        collections.deque(iter(dataset), maxlen=0)
        passes -= 1
    for each, times in _shuffling(dataset, passes, passes):
        for _ in range(times):
            iter(each)  # moves its own order alone: it begins the dataset that it is made from when it is first read


def _shuffling(dataset: tf.data.Dataset, begun: int, read: int) -> Iterator[tuple[tf.data.Dataset, int]]:
    """Yields the datasets that come in another order each time they begin, and how often they begin.

    Args:
        dataset: A dataset.
        begun: How many iterators of it are made.
        read: How many of them are read.
    """
    if isinstance(dataset, (ShuffleDataset, RandomDataset)):
        yield dataset, begun
        begun = read
    if isinstance(dataset, RepeatDataset):
        count = max(int(getattr(dataset, TF_COUNT)), 1)
        begun, read = begun + read * count, read * count  # it begins anew even after the last time
    for each in getattr(dataset, TF_INPUTS)():
        yield from _shuffling(each, begun, read)


def walk(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and the datasets it is made from, except those that its functions make."""
    yield dataset
    for each in getattr(dataset, TF_INPUTS)():
        yield from walk(each)


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns how many examples are in a batch of a dataset, as its outermost `batch` says; None where it is not told."""
    sizes = (getattr(each, TF_BATCH_SIZE, None) for each in walk(dataset))
    size = next((each for each in sizes if each is not None), None)
    return None if size is None else int(size)


def functions(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the traced functions of a dataset itself, as that of `map`."""
    for each in getattr(dataset, TF_FUNCTIONS)():
        yield each.function


def nodes(graph: tf.Graph) -> Iterator[tf.compat.v1.NodeDef]:
    """Yields the operations of a graph, and of all functions that it calls."""
    definition = graph.as_graph_def()
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def from_generator(generator: types.GeneratorType) -> tf.data.Dataset:
    """Makes a dataset of what a Python generator yields.

    Args:
        generator: Yields batches, as `fit` takes them.

    Raises:
        ValueError: As Keras: the generator is empty, or yields no tuples.
    """

    def present(batch: Any) -> Any:  # TensorFlow cannot split an absent sample_weight over replicas
        return batch[:-1] if isinstance(batch, tuple) and batch[-1] is None else batch

    return GeneratorDataAdapter(map(present, generator)).get_tf_dataset()
