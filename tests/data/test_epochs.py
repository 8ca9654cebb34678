"""Batch arithmetic, and a dataset that is a pure function of (seed, epoch, shard)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.config import validation
from tfdist.data import graph as graph_lib
from tfdist.data import sent_arrays
from tfdist.errors import ConfigError
from tfdist.parameter_server import worker_dataset
from tfdist.training import input_data

SIZE, BATCH = 50, 8
STEPS = SIZE // BATCH
ARRAYS = {"x": np.arange(2 * SIZE, dtype=np.float32).reshape(SIZE, 2), "y": np.arange(SIZE)}


def shards(pipelines=1, replicas_per_pipeline=1, steps=2 * STEPS, batch=BATCH, seed=0, arrays=None, **options):
    """Returns the examples of `steps` steps: `[pipeline][step][replica of the pipeline]` -> examples."""
    found = []
    for pipeline in range(pipelines):
        context = tf.distribute.InputContext(pipelines, pipeline, pipelines * replicas_per_pipeline)
        dataset = data.epochs(ARRAYS["y"] if arrays is None else arrays, context, batch, seed, **options)
        elements = dataset.take(steps * replicas_per_pipeline).as_numpy_iterator()
        found.append([[next(elements) for _ in range(replicas_per_pipeline)] for _ in range(steps)])
    return found


def global_batches(*args, **kwargs):
    """Returns each step's examples over all pipelines and replicas, in their order: `[steps, global batch]`."""
    return np.array([np.concatenate([*itertools.chain(*step)]) for step in zip(*shards(*args, **kwargs), strict=True)])


@pytest.mark.parametrize(("pipelines", "replicas"), [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (8, 1)])
def test_any_number_of_workers_trains_on_the_same_batches_in_the_same_order(pipelines, replicas):
    np.testing.assert_array_equal(global_batches(pipelines, replicas), global_batches())


def test_a_replicas_batch_is_its_share_of_the_global_batch():
    for pipeline in shards(2, 2):
        assert {len(replica) for step in pipeline for replica in step} == {2}


def test_the_order_is_a_function_of_the_seed():
    np.testing.assert_array_equal(global_batches(seed=7), global_batches(seed=7))
    assert (global_batches(seed=7) != global_batches(seed=8)).any()


def test_tensorflows_own_seed_and_state_do_not_matter():
    before = global_batches(steps=STEPS)
    tf.random.set_seed(123)
    tf.random.uniform([3])
    np.testing.assert_array_equal(global_batches(steps=STEPS), before)


def test_each_epoch_has_an_order_of_its_own():
    first, second = np.split(global_batches(), 2)
    assert (first != second).any()
    assert set(first.flat) != set(second.flat)  # and leaves out other examples


def test_an_epoch_has_each_example_at_most_once_and_as_many_as_fill_batches():
    for epoch in np.split(global_batches(2, 2), 2):
        assert len(set(epoch.flat)) == STEPS * BATCH


def test_an_epoch_of_full_batches_has_every_example_once():
    for epoch in np.split(global_batches(2, 1, batch=10, steps=15), 3):
        assert sorted(epoch.flat) == list(range(SIZE))


@pytest.mark.parametrize("start", [1, 3])
def test_starting_at_an_epoch_equals_skipping_those_before(start):
    skipped = global_batches(2, 2, steps=(start + 2) * STEPS)[start * STEPS :]
    np.testing.assert_array_equal(global_batches(2, 2, start_epoch=start), skipped)


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_parameter_servers_deal_whole_batches_to_workers_in_turn(steps):
    arrays = np.arange(steps * BATCH)
    contexts = [tf.distribute.InputContext(2, pipeline, 1) for pipeline in range(2)]
    dealt = [iter(data.epochs(arrays, context, BATCH, seed=3)) for context in contexts]
    found = [next(dealt[step % 2]).numpy() for step in range(4 * steps)]  # 4 epochs
    for epoch in np.reshape(found, (4, -1)):
        assert sorted(epoch) == list(arrays)


def test_without_shuffle_the_order_is_that_of_the_arrays():
    expected = np.tile(np.arange(STEPS * BATCH).reshape(STEPS, BATCH), [2, 1])
    np.testing.assert_array_equal(global_batches(2, 2, shuffle=False), expected)


def test_examples_stay_whole_and_keep_structure_and_types():
    for step in shards(arrays=ARRAYS, steps=STEPS)[0]:
        for batch in step:
            assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.int64)
            np.testing.assert_array_equal(batch["x"], ARRAYS["x"][batch["y"]])


def test_the_dataset_is_known_to_be_endless():
    dataset = data.epochs(ARRAYS, tf.distribute.InputContext(), BATCH, 0)
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY


def test_a_batch_that_replicas_do_not_divide_is_a_fault():
    with pytest.raises(ConfigError, match="8 is not divisible by 3 replicas; use 6 or 9"):
        shards(3)
    with pytest.raises(ConfigError, match="8 is not divisible by 3 replicas; use 6 or 9"):
        validation.per_replica_batch_size(8, 3)
    assert validation.per_replica_batch_size(9, 3) == 3


def test_a_batch_larger_than_the_data_is_a_fault():
    assert global_batches(batch=SIZE, steps=1).shape == (1, SIZE)
    with pytest.raises(ConfigError, match="global_batch_size 51 is larger than the training data, 50 examples"):
        shards(batch=SIZE + 1)


def test_a_generator_loses_nothing():
    batches = ((np.full((2, 1), number, np.float32),) for number in range(20))
    dataset = input_data.from_generator(batches)
    assert [int(x[0, 0]) for (x,) in dataset] == list(range(20))


def traced_dataset(function, pipelines=2):
    made = worker_dataset.WorkerDataset(function, pipelines)
    return made, [made._traced.get(number) or made._trace(number) for number in range(pipelines)]


def test_arrays_are_given_to_a_traced_function_and_not_held_by_its_graph():
    x = np.zeros((1000, 100), np.float32)
    _, traced = traced_dataset(lambda context: data.epochs((x, x), context, 10, seed=0))
    assert [tensor.shape for tensor in traced[0].captured_inputs] == [(1000, 100)]
    assert all(each.graph.as_graph_def().ByteSize() < 20_000 for each in traced)
    assert traced[0].captured_inputs[0] is traced[1].captured_inputs[0], "one tensor for all workers"


@pytest.mark.parametrize("piece", [2**28, 5 * 400, 1])
@pytest.mark.parametrize(
    "source", ["epochs", "from_tensor_slices", "with a list", "from_tensors", "tensor", "within map"]
)
def test_arrays_reach_workers_in_pieces_with_the_values_of_whole_ones(monkeypatch, source, piece):
    monkeypatch.setattr(sent_arrays, "PIECE", piece)
    monkeypatch.setattr(sent_arrays, "SMALLEST", 100)
    x = np.arange(5300, dtype=np.float32).reshape(53, 100)
    names = np.array([f"example {number}" for number in range(53)])
    labels, outside = list(range(53)), tf.constant(x)

    def make(context):
        if source == "epochs":
            return data.epochs({"x": x, "y": (names,)}, context, 8, seed=3).take(20)
        if source == "from_tensors":
            return tf.data.Dataset.from_tensors({"x": x, "y": (names, labels)})
        if source == "within map":
            return tf.data.Dataset.range(2).flat_map(lambda _: tf.data.Dataset.from_tensor_slices(x))
        given = {"x": outside} if source == "tensor" else {"x": x, "y": (names, x[:, 0])}
        if source == "with a list":
            given["y"] = labels
        return tf.data.Dataset.from_tensor_slices(given).shuffle(20, seed=3, reshuffle_each_iteration=False).batch(5)

    expected = make(tf.distribute.InputContext(2, 0, 1))
    made, traced = traced_dataset(make)
    sent = made.dataset(0)
    assert sent.element_spec == expected.element_spec
    assert sent.cardinality() == expected.cardinality()
    tf.nest.map_structure(
        np.testing.assert_array_equal, list(sent.as_numpy_iterator()), list(expected.as_numpy_iterator())
    )
    constants = [op for each in traced for op in graph_lib.nodes(each.graph) if op.op == "Const"]
    assert max(op.ByteSize() for op in constants) < 1500  # small ones stay
    assert isinstance(vars(tf.data.Dataset)["from_tensor_slices"], staticmethod)
    assert "tfdist" not in tf.data.Dataset.from_tensor_slices.__code__.co_filename


def test_graphs_of_arrays_do_not_grow_with_them():
    def size(examples):
        x = np.zeros((examples, 1000), np.float32)
        functions = (
            lambda context: data.epochs((x, x), context, 10, seed=0),
            lambda context: tf.data.Dataset.from_tensor_slices((x, x)).batch(10),
        )
        return [traced_dataset(each, 1)[1][0].graph.as_graph_def().ByteSize() for each in functions]

    assert np.allclose(size(100), size(10_000), atol=50)


def test_tensors_too_large_for_a_graph_are_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(sent_arrays, "LARGEST", 10_000)
    x = np.zeros((100, 100), np.float32)
    with pytest.raises(
        ConfigError,
        match=r"tensors of 2 GB and more .* let it read files, .* give the arrays themselves to tfdist\.data",
    ):
        worker_dataset.WorkerDataset(lambda context: tf.data.Dataset.from_tensors(tf.constant(x) + 1), 2)
    with pytest.raises(ConfigError, match="tensors of 2 GB and more"):
        worker_dataset.WorkerDataset(lambda context: tf.data.Dataset.from_tensors(np.zeros((200, 100), np.float32)), 2)
