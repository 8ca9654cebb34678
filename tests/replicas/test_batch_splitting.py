"""Batches are dealt out evenly and in order, and no replica is without an example."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.replicas import batch_splitting

X = np.arange(30).reshape(15, 2)
KINDS = {
    "dense": lambda size: tf.data.Dataset.from_tensor_slices((X[:size], {"b": X[:size, 0]})),
    "one": lambda size: tf.data.Dataset.from_tensor_slices(X[:size]),
    "strings": lambda size: tf.data.Dataset.from_tensor_slices((X[:size].astype(str),)),
    "ragged": lambda size: tf.data.Dataset.from_tensor_slices(
        (tf.RaggedTensor.from_row_lengths(range(size * (size - 1) // 2), range(size)), X[:size])
    ),
    "sparse": lambda size: tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X[:size]), X[:size])),
}


def rows(batch):
    """A batch as a list of one flat list for each example."""

    def listed(value):
        if isinstance(value, tf.SparseTensor):
            value = tf.sparse.to_dense(value)
        return value.to_list() if isinstance(value, tf.RaggedTensor) else value.numpy().tolist()

    parts = [value for value in tf.nest.flatten(batch) if value is not None]
    return list(zip(*map(listed, parts), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "replicas"), [(15, 1), (15, 2), (11, 4), (9, 8), (3, 8)])
def test_a_batch_is_split_evenly_and_in_order(kind, size, replicas):
    batches = KINDS[kind](size).batch(7)
    assert batch_splitting.is_splittable(batches.element_spec)
    dealt = list(batch_splitting.split_batches(batches, replicas, range(replicas)))
    for number, batch in enumerate(batches):
        parts = dealt[number * replicas : (number + 1) * replicas]
        counts = [int(part.counts[0, 0]) for part in parts]
        whole = rows(batch)
        assert [row for part, count in zip(parts, counts, strict=True) for row in rows(part.batch)[:count]] == whole
        assert counts == [len(part) for part in np.array_split(range(len(whole)), replicas)]
        assert {tuple(part.counts[0, 1:].numpy()) for part in parts} == {(len(whole), min(len(whole), replicas))}
        assert all(rows(part.batch) == whole[:1] for part, count in zip(parts, counts, strict=True) if not count)


def test_workers_split_alike_what_keras_puts_together_again():
    batches = KINDS["one"](15).batch(10)
    mine = list(batch_splitting.split_batches(batches, 4, [1, 3]))
    everything = list(batch_splitting.split_batches(batches, 4, range(4)))
    assert [rows((part.batch,)) for part in mine] == [rows((everything[i].batch,)) for i in (1, 3, 5, 7)]
    assert batch_splitting.split_batches(batches, 4, [1, 3]).cardinality() == 4
    assert batch_splitting.split_batches(batches, 4, [1]).cardinality() == 2
    assert batch_splitting.split_batches(batches.repeat(), 4, [1]).cardinality() == tf.data.INFINITE_CARDINALITY
    assert (
        batch_splitting.split_batches(batches.filter(lambda _: True), 4, [1]).cardinality()
        == tf.data.UNKNOWN_CARDINALITY
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_goes_on_with_an_example_that_does_not_count(kind):
    batches = KINDS[kind](11).batch(4)
    endless = batch_splitting.repeat_empty_batches(batches)
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
    dealt = list(endless.take(6))
    assert [part.counts[0].numpy().tolist() for part in dealt] == [[4, 1], [4, 1], [3, 1], [0, 0], [0, 0], [0, 0]]
    assert [rows(part.batch) for part in dealt[:3]] == [rows(batch) for batch in batches]
    last = rows(next(iter(batches.skip(2))))[:1]
    assert [rows(part.batch) for part in dealt[3:]] == [last] * 3


def test_an_empty_batch_amid_others_has_an_example_that_does_not_count():
    batches = tf.data.Dataset.from_generator(
        lambda: ([1, 2], [], [3]), output_signature=tf.TensorSpec([None], tf.int32)
    )
    dealt = list(batch_splitting.repeat_empty_batches(batches).take(3))
    assert [part.batch.numpy().tolist() for part in dealt] == [[1, 2], [1], [3]]
    assert [int(part.counts[0, 0]) for part in dealt] == [2, 0, 1]


def test_what_has_no_rows_is_left_to_tensorflow():
    assert not batch_splitting.is_splittable(tf.data.Dataset.range(3).element_spec)
    assert not batch_splitting.is_splittable(())


@pytest.mark.parametrize("kind", KINDS)
def test_empty_parts_follow_the_last_batch_without_end(kind):
    parts = batch_splitting.split_batches(KINDS[kind](5).batch(2), 2, [0, 1])
    endless = batch_splitting.with_empty_parts_at_end(parts)
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
    found = list(endless.take(9))
    assert [part.counts[0, 0].numpy() for part in found] == [1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert [part.counts[0, 1].numpy() for part in found] == [2, 2, 2, 2, 1, 1, 0, 0, 0]
    assert [rows(part.batch) for part in found[:6]] == [rows(part.batch) for part in parts]
    assert rows(found[-1].batch) == []


def test_of_an_unknown_number_of_batches_the_end_stays():
    batches = tf.data.Dataset.from_tensor_slices(X).batch(5).filter(lambda _: True)
    parts = batch_splitting.with_empty_parts_at_end(batch_splitting.split_batches(batches, 2, [1]))
    assert len(list(parts)) == 3
