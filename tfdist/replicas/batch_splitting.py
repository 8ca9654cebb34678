"""The split of batches among replicas, so that every replica has an example.

TensorFlow rounds the parts of a batch up, so that the last replicas may have no examples. 33 examples over 8 replicas become
5, 5, 5, 5, 5, 5, 3, 0. Convolutions, pooling and recurrent layers fail on an empty batch, and means become NaN. Here the
parts differ by at most one example, and a replica without examples gets a padding example that does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.aliases import Spec, Structure
from tfdist.compat.tf_internals import num_replicas, regroup
from tfdist.errors import ConfigError
from tfdist.replicas.batch_shares import BatchShares
from tfdist.strategy import Strategy

_NOT_WHOLE = (
    "batch_shares='by_speed' divides batches that all workers pass whole. Received: separate data of each worker, or batches without rows. "
    "Pass arrays, a tf.data.Dataset, arrays_from, rows_from or records_from, or leave batch_shares out."
)

ENDED_EARLY = "The data of this worker have ended before those of another one."


class SplitBatch(NamedTuple):
    """A replica's part of a batch.

    Attributes:
        batch: The replica's examples, at least one, in the structure of the data.
        counts: int64 `[1, 3]`: the replica's examples that count, the examples of all replicas, and the replicas with examples.
            `[1, 2]` if the other replicas are unknown: the replica's examples that count, and 1 if there are any, else 0. None
            if all examples count.
    """

    batch: Structure
    counts: tf.Tensor | None


class WholeBatch(NamedTuple):
    """A batch of all replicas that each worker reads whole; the step takes this worker's share (see `BatchShares`)."""

    batch: Structure


def examples(batch: Structure) -> tf.Tensor | int | None:
    """Returns the number of examples in a batch: an int if it is static in a trace, None without a batch axis."""
    first = next((v for v in tf.nest.flatten(batch) if v is not None), None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    if first is None or not first.shape.rank:
        return None
    # An eager shape has the size of this replica only.
    known = first.shape[0] is not None and not tf.executing_eagerly()
    return int(first.shape[0]) if known else tf.shape(first)[0]


def without_optionals(data: Structure) -> Structure:
    """Returns Keras' data with None for parts that it marks as absent."""
    absent = (tf.experimental.Optional, tf.OptionalSpec)
    return tf.nest.map_structure(lambda v: None if isinstance(v, absent) else v, data)


def is_splittable(spec: Spec) -> bool:
    """Returns whether a dataset's elements are batches that can be split by rows."""
    specs = tf.nest.flatten(spec)
    kinds = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
    return bool(specs) and all(isinstance(s, kinds) and s.shape.rank for s in specs)


def static_batch_size(spec: Spec) -> int | None:
    """Returns the number of examples in every batch of a dataset; None if it is unknown."""
    sizes = {s.shape[0] for s in tf.nest.flatten(spec)}
    return sizes.pop() if len(sizes) == 1 else None


def split_batches(dataset: tf.data.Dataset, replicas: int, parts: Sequence[int]) -> tf.data.Dataset:
    """Splits each batch evenly among all replicas, in order. Returns a dataset with the `parts` of each batch in turn."""

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
    return with_cardinality(dealt, int(dataset.cardinality()), len(parts)).prefetch(len(parts))


def with_cardinality(dataset: tf.data.Dataset, batches: int, parts: int) -> tf.data.Dataset:
    """Declares that a dataset has `parts` elements for each of `batches` batches, whose number may be a negative cardinality."""
    if batches == tf.data.UNKNOWN_CARDINALITY:
        return dataset
    if batches != tf.data.INFINITE_CARDINALITY:
        batches *= parts
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


def with_empty_parts_at_end(dealt: tf.data.Dataset) -> tf.data.Dataset:
    """Makes a dataset of `split_batches`, whose number of parts is known, continue with empty parts without end.

    Of a dataset that ends, TensorFlow asks all workers before each step, by a collective, whether they have data.
    """
    if int(dealt.cardinality()) < 0:
        return dealt
    batch = tf.nest.map_structure(_empty_component, dealt.element_spec.batch)
    empty = tf.data.Dataset.from_tensors(SplitBatch(batch, tf.zeros([1, 3], tf.int64)))
    return dealt.concatenate(empty.repeat()).prefetch(1)


def repeat_empty_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes a worker's dataset, of batches for one replica each, continue with a padding example that does not count.

    The dataset of `SplitBatch`es is infinite: when the counts of all replicas are 0, the data of all workers have ended.
    """
    spec = dataset.element_spec
    empty = tf.nest.map_structure(_empty_component, spec)

    @tf.autograph.experimental.do_not_convert
    def counted(*element: Structure) -> SplitBatch:
        batch = batch_of(dataset, element)
        size = tf.cast(num_rows(batch), tf.int64)
        return SplitBatch(batch, tf.stack([[size, tf.cast(size > 0, tf.int64)]]))

    @tf.autograph.experimental.do_not_convert
    def or_last_example(last: tf.Tensor, dealt: Structure) -> tuple[Structure, SplitBatch]:
        batch, counts = dealt
        has_rows = counts[0, 0] > 0
        example, components = tf.cond(has_rows, lambda: (flat(rows_of(batch, 0, 1)), flat(batch)), lambda: (last, last))
        return example, SplitBatch(tf.nest.pack_sequence_as(spec, components, expand_composites=True), counts)

    def flat(batch: Structure) -> tuple[tf.Tensor, ...]:  # `scan` takes no sparse or ragged tensors
        return tuple(tf.nest.flatten(batch, expand_composites=True))

    end = tf.data.Dataset.from_tensors(SplitBatch(empty, tf.constant([[0, 0]], tf.int64))).repeat()
    return dataset.map(counted).concatenate(end).scan(flat(empty), or_last_example)


def count_examples(dealt: SplitBatch, strategy: tf.distribute.Strategy) -> tf.Tensor:
    """Returns `[examples of all replicas, replicas with examples]`, int64. Outside of replicas.

    A collective if the replicas do not know each other's counts (see `repeat_empty_batches`). Raises InvalidArgumentError with
    `ENDED_EARLY` if TensorFlow has no data for this worker, but has data for another one.
    """
    local_counts = strategy.experimental_local_results(dealt.counts)[0]
    if local_counts.shape[1] == 3:
        with tf.control_dependencies([tf.debugging.Assert(tf.shape(local_counts)[0] > 0, [ENDED_EARLY])]):
            return tf.identity(local_counts)[0, 1:]
    return strategy.reduce(tf.distribute.ReduceOp.SUM, dealt.counts, axis=None)[0]


def is_over(batch: Structure, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether no replica has an example in a distributed iterator's batch: the data of all workers have ended.

    A collective, like `count_examples`.
    """
    return isinstance(batch, SplitBatch) and int(count_examples(batch, strategy)[0]) == 0


def is_own(dealt: SplitBatch, strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a batch comes from each worker's own data, so that workers do not know each other's rows."""
    return bool(strategy.experimental_local_results(dealt.counts)[0].shape[1] == 2)


def check_part_of_whole(data: Structure, strategy: tf.distribute.Strategy) -> None:
    """Raises ConfigError unless data are parts of one batch of all replicas, which `split_whole` has split."""
    if not isinstance(data, SplitBatch) or is_own(data, strategy):
        raise ConfigError(_NOT_WHOLE)


def local_rows(dealt: SplitBatch, strategy: tf.distribute.Strategy) -> list[int]:
    """Returns, for each replica of this worker, the number of rows that count. Outside of replicas, eagerly."""
    return [int(counts[0, 0]) for counts in strategy.experimental_local_results(dealt.counts)]


def whole_batches(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of `WholeBatch`es."""
    make = tf.autograph.experimental.do_not_convert(lambda *element: WholeBatch(batch_of(dataset, element)))
    return dataset.map(make).prefetch(1)


def split_whole(batch: Structure, strategy: Strategy) -> Structure:
    """Splits a batch that every worker passes whole, as a loop splits the batches of a dataset. Outside of replicas.

    With `strategy.batches_are_parts` each worker passes its own part of the batch. Returns the `SplitBatch` of each replica of this process;
    `batch` itself if it is distributed already, or has no rows to split.
    """
    if isinstance(batch, WholeBatch):
        local = strategy.experimental_local_results
        batch = without_optionals(tf.nest.map_structure(lambda value: local(value)[0], batch.batch))
    tensors = [value for value in tf.nest.flatten(batch) if value is not None]
    kinds = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    has_rows = bool(tensors) and all(isinstance(value, kinds) and value.shape.rank for value in tensors)
    if isinstance(batch, SplitBatch) or not has_rows or num_replicas(strategy) == 1:
        return batch
    if not strategy.batches_are_parts:
        replicas = num_replicas(strategy)
        shares = strategy.batch_shares
        return regroup(tuple(_part(batch, number, replicas, shares) for number in strategy.local_replicas))
    replicas = len(strategy.local_replicas)
    return regroup(tuple(_with_own_count(_part(batch, number, replicas)) for number in range(replicas)))


def _with_own_count(part: SplitBatch) -> SplitBatch:
    """Returns a part of this worker's rows, of which the other workers do not know the number."""
    own = part.counts[:, :1]  # type: ignore[index]
    return SplitBatch(part.batch, tf.concat([own, tf.minimum(own, 1)], 1))


def counted_rows(outputs: Structure, dealt: SplitBatch) -> Structure:
    """Returns a replica's outputs for the examples that count."""
    return outputs if dealt.counts is None else rows_of(outputs, 0, dealt.counts[0, 0])


def position_in_batch(strategy: tf.distribute.Strategy, size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the index among `size` examples of the first one in this replica's even part, and `size`. In a replica."""
    part = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)
    size = tf.cast(size, tf.int64)
    begin, _ = even_part(part, size, num_replicas(strategy))
    return begin, size


def even_part(part: tf.Tensor, size: tf.Tensor, parts: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the begin and the size of one of the even parts of `size` rows. The first `size % parts` parts have one row more. int64."""
    shortest = size // parts
    longer_parts = size % parts
    return part * shortest + tf.minimum(part, longer_parts), shortest + tf.cast(part < longer_parts, tf.int64)


def relax_batch_size(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes the batch size of a dataset unknown.

    If batches have a fixed size, TensorFlow skips a last step in which a replica has no examples.
    """

    @tf.autograph.experimental.do_not_convert
    def relax(*element: Structure) -> Structure:
        return relax_size(batch_of(dataset, element))

    return dataset.map(relax)


def relax_size(batch: Structure) -> Structure:
    """Returns a batch whose size is unknown to the trace, so that the size is not a constant there."""

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
    first = next(value for value in tf.nest.flatten(batch) if value is not None)
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    return first.dense_shape[0] if isinstance(first, tf.SparseTensor) else tf.shape(first)[0]


def _part(batch: Structure, part: tf.Tensor, replicas: int, shares: BatchShares | None = None) -> SplitBatch:
    """Returns one of `replicas` parts of a batch, in its order, even without `shares`. An empty part holds the batch's first example, not counted."""
    size = tf.cast(num_rows(batch), tf.int64)
    if shares:
        bounds = shares.bounds(size)
        begin = bounds[part]
        count = bounds[part + 1] - begin
        with_examples = tf.math.count_nonzero(bounds[1:] - bounds[:-1])
    else:
        begin, count = even_part(tf.cast(part, tf.int64), size, replicas)
        with_examples = tf.minimum(size, replicas)
    begin = tf.where(count > 0, begin, 0)
    # Take at least one row, because convolutions, pooling and recurrent layers fail on none. `count` 0 gives it no weight.
    rows = rows_of(batch, begin, begin + tf.maximum(count, 1))
    return SplitBatch(rows, tf.stack([[count, size, with_examples]]))


def rows_of(batch: Structure, begin: tf.Tensor, end: tf.Tensor) -> Structure:
    """Returns the examples from `begin` (inclusive) to `end` (exclusive)."""

    def take(values: Structure) -> Structure:
        if values is None:  # an absent sample_weight
            return None
        if not isinstance(values, tf.SparseTensor):
            return values[begin:end]
        shape = tf.shape(values, out_type=tf.int64)
        first = tf.cast(begin, tf.int64)
        count = tf.minimum(tf.cast(end, tf.int64), shape[0]) - first
        zeros = tf.zeros_like(shape[1:])
        return tf.sparse.slice(values, tf.concat([[first], zeros], 0), tf.concat([[count], shape[1:]], 0))

    return tf.nest.map_structure(take, batch)


def _empty_component(spec: Spec) -> Structure:
    shape = [0, *(size or 0 for size in spec.shape[1:])]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype), shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        values = tf.zeros([0, *(size or 0 for size in spec.shape[1 + spec.ragged_rank :])], spec.dtype)
        for _ in range(spec.ragged_rank):
            values = tf.RaggedTensor.from_row_splits(values, tf.zeros([1], spec.row_splits_dtype), validate=False)
        return values
    return tf.zeros(shape, spec.dtype)
