"""Splits batches among replicas, so that none is without an example.

TensorFlow splits a batch by rounding up, and gives the last replicas none: 33 examples over 8 replicas as 5, 5, 5, 5, 5, 5, 3, 0.
Convolutions, pooling and recurrent layers fail on none, and means become NaN. Here every replica has the same number, or one
more; where there are fewer examples than replicas, it has one that does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.aliases import Spec, Structure
from tfdist.compat.tf_internals import num_replicas

ENDED_EARLY = "The data of this worker have ended before those of another one."


class SplitBatch(NamedTuple):
    """A replica's part of a batch.

    Attributes:
        batch: Its examples, in the structure of the data: at least one.
        counts: int64 `[1, 3]`: its examples that count, those of all replicas, the replicas that have some. Where the others
            are not known, `[1, 2]`: its examples that count, and whether there are any. None if all count.
    """

    batch: Structure
    counts: tf.Tensor | None


def examples(batch: Structure) -> tf.Tensor | int | None:
    """Returns the number of examples in a batch: an int where it is known while a step is traced, None where there are none."""
    first = next((v for v in tf.nest.flatten(batch) if v is not None), None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    if first is None or not first.shape.rank:
        return None
    known = first.shape[0] is not None and not tf.executing_eagerly()  # which knows each replica's own alone
    return int(first.shape[0]) if known else tf.shape(first)[0]


def without_optionals(data: Structure) -> Structure:
    """Returns Keras' data with None for parts that it marks as absent."""
    absent = (tf.experimental.Optional, tf.OptionalSpec)
    return tf.nest.map_structure(lambda v: None if isinstance(v, absent) else v, data)


def is_splittable(spec: Spec) -> bool:
    """Returns whether elements of a dataset are batches of rows that can be taken apart."""
    specs = tf.nest.flatten(spec)
    kinds = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
    return bool(specs) and all(isinstance(each, kinds) and each.shape.rank for each in specs)


def static_batch_size(spec: Spec) -> int | None:
    """Returns the number of examples that every batch of a dataset has, None where that is not known."""
    sizes = {each.shape[0] for each in tf.nest.flatten(spec)}
    return sizes.pop() if len(sizes) == 1 else None


def split_batches(dataset: tf.data.Dataset, replicas: int, parts: Sequence[int]) -> tf.data.Dataset:
    """Splits each batch of a dataset, for all replicas, evenly and in order. Returns `SplitBatch`es: for each batch, those `parts` in turn."""

    @tf.autograph.experimental.do_not_convert
    def take(part: tf.Tensor, *element: Structure) -> SplitBatch:
        return _part(batch_of(dataset, element), part, replicas)

    @tf.autograph.experimental.do_not_convert
    def take_all(*element: Structure) -> tf.data.Dataset:
        numbers = tf.data.Dataset.from_tensor_slices(tf.constant(list(parts), tf.int64))
        return numbers.map(tf.autograph.experimental.do_not_convert(lambda part: take(part, *element)))

    if len(parts) == 1:
        dealt = dataset.map(tf.autograph.experimental.do_not_convert(functools.partial(take, parts[0])))
    else:
        dealt = dataset.flat_map(take_all)
    if (batches := int(dataset.cardinality())) != tf.data.UNKNOWN_CARDINALITY:
        dealt = dealt.apply(tf.data.experimental.assert_cardinality(batches if batches < 0 else batches * len(parts)))
    return dealt.prefetch(len(parts))


def repeat_empty_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes a worker's dataset, of batches for one replica each, go on with an example that does not count.

    The dataset of `SplitBatch` is endless: when the counts of all replicas are 0, all workers have come to their end.
    """
    spec = dataset.element_spec
    nothing = tf.nest.map_structure(_nothing, spec)

    @tf.autograph.experimental.do_not_convert
    def counted(*element: Structure) -> SplitBatch:
        batch = batch_of(dataset, element)
        size = tf.cast(num_rows(batch), tf.int64)
        return SplitBatch(batch, tf.stack([[size, tf.cast(size > 0, tf.int64)]]))

    @tf.autograph.experimental.do_not_convert
    def never_none(last: tf.Tensor, dealt: Structure) -> tuple[Structure, SplitBatch]:
        batch, counts = dealt
        found = tf.cond(counts[0, 0] > 0, lambda: (flat(rows_of(batch, 0, 1)), flat(batch)), lambda: (last, last))
        return found[0], SplitBatch(tf.nest.pack_sequence_as(spec, found[1], expand_composites=True), counts)

    def flat(batch: Structure) -> tuple[tf.Tensor, ...]:  # `scan` takes no sparse or ragged tensors
        return tuple(tf.nest.flatten(batch, expand_composites=True))

    end = tf.data.Dataset.from_tensors(SplitBatch(nothing, tf.constant([[0, 0]], tf.int64))).repeat()
    return dataset.map(counted).concatenate(end).scan(flat(nothing), never_none)


def count_examples(dealt: SplitBatch, strategy: tf.distribute.Strategy) -> tf.Tensor:
    """Returns `[examples of all replicas, replicas that have some]`, int64, outside of replicas.

    A collective where no replica knows the others' (see `repeat_empty_batches`). Raises InvalidArgumentError, with `ENDED_EARLY`, where TensorFlow
    has nothing for this worker, and something for another one.
    """
    mine = strategy.experimental_local_results(dealt.counts)[0]
    if mine.shape[1] == 3:
        with tf.control_dependencies([tf.debugging.Assert(tf.shape(mine)[0] > 0, [ENDED_EARLY])]):
            return tf.identity(mine)[0, 1:]
    return strategy.reduce(tf.distribute.ReduceOp.SUM, dealt.counts, axis=None)[0]


def is_over(batch: Structure, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether no replica has an example of a batch of a distributed iterator: the data of all workers have ended.

    A collective, as `count_examples`.
    """
    return isinstance(batch, SplitBatch) and int(count_examples(batch, strategy)[0]) == 0


def is_own(dealt: SplitBatch, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a batch was made of each worker's own data, so that none knows the others' rows."""
    return bool(strategy.experimental_local_results(dealt.counts)[0].shape[1] == 2)


def local_rows(dealt: SplitBatch, strategy: tf.distribute.Strategy) -> list[int]:
    """Returns how many rows of a batch count, of each replica of this worker. Outside of replicas, eagerly."""
    return [int(counts[0, 0]) for counts in strategy.experimental_local_results(dealt.counts)]


def part_of_batch(batch: Structure, strategy: tf.distribute.Strategy) -> SplitBatch:
    """Returns this replica's part of a batch that all replicas are given. In a replica."""
    return _part(batch, _replica(), num_replicas(strategy))


def counted_rows(outputs: Structure, dealt: SplitBatch) -> Structure:
    """Returns those of a replica's outputs that are of examples that count."""
    return outputs if dealt.counts is None else rows_of(outputs, 0, dealt.counts[0, 0])


def place_in_batch(strategy: tf.distribute.Strategy, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns which of `size` examples is the first of this replica's even part, from 0, and `size`. In a replica."""
    part, replicas = tf.cast(_replica(), tf.int64), num_replicas(strategy)
    size = tf.cast(size, tf.int64)
    return part * (size // replicas) + tf.minimum(part, size % replicas), size


def _replica() -> tf.Tensor:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def relax_batch_size(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes the batch size of a dataset unknown.

    Where batches have a fixed size, TensorFlow leaves out a last step in which some replica has none.
    """

    @tf.autograph.experimental.do_not_convert
    def each(*element: Structure) -> Structure:
        return relax_size(batch_of(dataset, element))

    return dataset.map(each)


def relax_size(batch: Structure) -> Structure:
    """Returns a batch of which the trace does not know the size, so that it is no constant there."""

    def relaxed(tensor: tf.Tensor) -> Structure:
        if isinstance(tensor, tf.RaggedTensor):
            first, *others = tensor.nested_row_splits
            return tf.RaggedTensor.from_nested_row_splits(tensor.flat_values, [relaxed(first), *others], validate=False)
        if not (isinstance(tensor, tf.Tensor) and tensor.shape.rank and tf.inside_function()):
            return tensor
        return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])

    return tf.nest.map_structure(relaxed, batch)


def batch_of(dataset: tf.data.Dataset, element: tuple[Structure, ...]) -> Structure:
    return element if isinstance(dataset.element_spec, tuple) else element[0]


def num_rows(batch: Structure) -> tf.Tensor:
    first = tf.nest.flatten(batch)[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    return first.dense_shape[0] if isinstance(first, tf.SparseTensor) else tf.shape(first)[0]


def _part(batch: Structure, part: tf.Tensor, replicas: int) -> SplitBatch:
    """Returns one of `replicas` even parts of a batch, in its order. An empty part holds the batch's first example, not counted."""
    size = tf.cast(num_rows(batch), tf.int64)
    part, shortest, longer_parts = tf.cast(part, tf.int64), size // replicas, size % replicas
    # The first `longer_parts` parts have one example more, so this one begins after `min(part, longer_parts)` of these.
    count = shortest + tf.cast(part < longer_parts, tf.int64)
    begin = tf.where(count > 0, part * shortest + tf.minimum(part, longer_parts), 0)
    # At least one row, as convolutions, pooling and recurrent layers fail without; `count` is 0 then, so it has no weight.
    rows = rows_of(batch, begin, begin + tf.maximum(count, 1))
    return SplitBatch(rows, tf.stack([[count, size, tf.minimum(size, replicas)]]))


def rows_of(batch: Structure, begin: tf.Tensor, end: tf.Tensor) -> Structure:
    """Returns the examples from `begin` up to, but not, `end`."""

    def take(values: Structure) -> Structure:
        if not isinstance(values, tf.SparseTensor):
            return values[begin:end]
        shape = tf.shape(values, out_type=tf.int64)
        first = tf.cast(begin, tf.int64)
        count = tf.minimum(tf.cast(end, tf.int64), shape[0]) - first
        zeros = tf.zeros_like(shape[1:])
        return tf.sparse.slice(values, tf.concat([[first], zeros], 0), tf.concat([[count], shape[1:]], 0))

    return tf.nest.map_structure(take, batch)


def _nothing(spec: Spec) -> Structure:
    shape = [0, *(size or 0 for size in spec.shape[1:])]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *(size or 0 for size in spec.shape[1 + spec.ragged_rank :])], spec.dtype)
        for _ in range(spec.ragged_rank):
            values = tf.RaggedTensor.from_row_splits(values, tf.zeros([1], spec.row_splits_dtype), validate=False)
        return values
    return tf.zeros(shape, spec.dtype)
