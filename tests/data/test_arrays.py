"""`epochs`: batch arithmetic, and a dataset that is a pure function of (seed, epoch, shard)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdist import data
from tfdist.config import validation
from tfdist.errors import ConfigError

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
