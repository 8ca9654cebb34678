"""What is compared between workers of the order in which a dataset yields its elements."""

import pytest
import tensorflow as tf

from tfdist.data.graph import describe_order

range_ = tf.data.Dataset.range


@pytest.mark.parametrize(
    "make",
    [
        lambda: range_(9).shuffle(9),
        lambda: range_(9).cache().shuffle(9, reshuffle_each_iteration=False).prefetch(2),
        lambda: tf.data.Dataset.sample_from_datasets([range_(3), range_(4)], [0.5, 0.5]),
        lambda: tf.data.Dataset.random().take(4),
        lambda: tf.data.Dataset.zip((range_(3), range_(3).shuffle(3))),
        lambda: range_(3).concatenate(range_(3).shuffle(3)),
        lambda: tf.data.Dataset.from_generator(lambda: iter([1, 2]), output_signature=tf.TensorSpec([])).shuffle(2),
    ],
)
def test_a_draw_before_changes_the_description_and_a_tracing_before_does_not(make):
    def described(draws):
        tf.random.set_seed(3)
        for _ in range(draws):
            tf.random.uniform([])
        return describe_order(make())

    first = described(0)
    range_(3).map(lambda i: i + 1).filter(lambda i: i > 0)
    assert first == described(0) != described(1)


def shuffled(number):
    return range_(number).shuffle(3).map(lambda each: each + number)


def interleaved(number):
    return range_(number).interleave(shuffled, num_parallel_calls=2)


def drawn(_):
    return tf.random.uniform([]) < 0.5


def shuffled_window(_, window):
    return window.shuffle(2).batch(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: range_(4).interleave(shuffled, cycle_length=2),
        lambda: range_(4).flat_map(interleaved),
        lambda: range_(9).group_by_window(lambda i: i % 2, shuffled_window, 3),
        lambda: range_(9).filter(drawn),
    ],
)
@pytest.mark.filterwarnings("ignore:Seed . from outer graph")
def test_the_global_seed_changes_the_description_of_what_functions_draw(make):
    def described(seed):
        tf.random.set_seed(seed)
        return describe_order(make())

    assert described(3) == described(3) != described(4)


def test_it_names_methods_and_numbers_and_leaves_out_what_keeps_the_order():
    dataset = range_(9).shard(2, 1).map(lambda i: i + tf.random.uniform([], 0, 2, tf.int64)).padded_batch(2)
    assert describe_order(dataset.cache().prefetch(3)) == ["shard(num_shards=2, index=1)", "padded_batch(batch_size=2)"]
    assert describe_order(range_(9).batch(2, num_parallel_calls=3)) == describe_order(range_(9).batch(2))
