"""`compares_examples`: which functions have values of an example that depend on the other examples."""

import keras
import pytest
import tensorflow as tf
from keras import ops

import tfdist
from tfdist.step.compared_examples import compares_examples


def squares(y_true, y_pred):
    return ops.mean((y_true - y_pred) ** 2, axis=1)


def softmax_over_the_batch(y_true, y_pred):
    return ops.logsumexp(y_pred @ ops.transpose(y_pred), axis=1)


def hardest(y_true, y_pred):
    """The distance to the nearest other example."""
    distances = ops.sum((y_pred[:, None] - y_pred[None]) ** 2, axis=-1)
    return ops.min(distances + 1e9 * ops.eye(ops.shape(y_pred)[0]), axis=1)


def of_neighbors(y_true, y_pred):
    return squares(ops.roll(y_pred, 1, axis=0), y_pred)


def of_halves(y_true, y_pred):
    first, second = ops.split(y_pred, 2, axis=0)
    return ops.concatenate([squares(first, second)] * 2)


def weighted_by_counts(y_true, y_pred):
    return squares(y_true, ops.ones_like(y_true)) / ops.mean(y_true)


def within_a_function(y_true, y_pred):
    return tf.function(lambda y: tf.reduce_mean(y, 1) - tf.reduce_mean(y))(y_pred)


def for_each_pixel(y_true, y_pred):
    return y_pred - ops.mean(y_pred)


COMPARING = [
    softmax_over_the_batch,
    hardest,
    of_neighbors,
    of_halves,
    weighted_by_counts,
    within_a_function,
    for_each_pixel,
]


def shifted_by_the_largest(y_true, y_pred):
    """Equal but for rounding, whatever the other examples are."""
    largest = ops.max(y_pred)
    return ops.log(ops.sum(ops.exp(y_pred - largest), axis=1)) + largest


def divided_by_the_size(y_true, y_pred):
    return squares(y_true, y_pred) / ops.cast(ops.shape(y_pred)[0], y_pred.dtype)


def with_dropout(y_true, y_pred):
    return squares(y_true, keras.random.dropout(y_pred, 0.5))


def with_noise(y_true, y_pred):
    return squares(y_true, y_pred + tf.random.normal(tf.shape(y_pred), dtype=y_pred.dtype))


def over_gathered_rows(y_true, y_pred):
    return ops.logsumexp(y_pred @ ops.transpose(tfdist.whole_batch(y_pred)), axis=1)


def by_python(y_true, y_pred):
    return tf.py_function(lambda y: tf.reduce_mean(y, 1) - tf.reduce_max(y), [y_pred], y_pred.dtype)


def of_another_size(y_true, y_pred):
    return ops.mean(ops.reshape(y_pred - ops.max(y_pred), (5, -1)), axis=1)


def of_no_numbers(y_true, y_pred):
    return ops.log(y_pred - ops.max(y_pred, axis=1, keepdims=True) - 1)[:, 0]


def that_asserts(y_true, y_pred):
    tf.debugging.assert_greater(tf.shape(y_pred)[0], 0)
    return squares(y_true, y_pred)


APART = [
    squares,
    shifted_by_the_largest,
    divided_by_the_size,
    with_dropout,
    with_noise,
    over_gathered_rows,
    by_python,
    of_another_size,
]
APART += [of_no_numbers, that_asserts]


@pytest.fixture(scope="module")
def strategy(mirrored):
    return tfdist.Trainer(mirrored).strategy


def found_in_a_step(strategy, function, y_true, y_pred):
    """Returns the result of `compares_examples` in a step that is traced on replicas, as in `fit`."""
    results = []

    def step():
        results.append(compares_examples(function, tf.zeros(y_true[0], y_true[1]), tf.zeros(y_pred[0], y_pred[1])))
        return 0

    tf.function(lambda: strategy.run(step), autograph=False)()
    assert len(set(results)) == 1, "all replicas decide alike"
    return results[0]


@pytest.mark.parametrize("function", COMPARING + APART, ids=lambda function: function.__name__)
def test_values_that_depend_on_other_examples(strategy, function):
    found = found_in_a_step(strategy, function, ((3, 1), "float32"), ((3, 6), "float32"))
    assert found == (function in COMPARING)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes_round_otherwise(strategy, dtype):
    arguments = ((3, 1), "int32"), ((3, 6), dtype)
    assert found_in_a_step(strategy, of_neighbors, *arguments)
    assert not found_in_a_step(strategy, shifted_by_the_largest, *arguments)


def test_variables_are_read_and_not_assigned(strategy):
    with strategy.scope():
        scale, count = keras.Variable(2.0), keras.Variable(0.0)

    def reads(y_true, y_pred):
        return scale * for_each_pixel(y_true, y_pred)

    def assigns(y_true, y_pred):
        count.assign_add(1.0)
        return for_each_pixel(y_true, y_pred)

    shapes = ((3, 1), "float32"), ((3, 6), "float32")
    assert found_in_a_step(strategy, reads, *shapes)
    assert not found_in_a_step(strategy, assigns, *shapes)
    assert float(count.numpy()) == 0


def test_arguments_that_are_no_rows_of_examples_decide_nothing(strategy):
    numbers = ((3, 6), "float32")
    assert not found_in_a_step(strategy, for_each_pixel, numbers, ((6, 6), "float32"))
    assert not found_in_a_step(strategy, for_each_pixel, ((3,), "string"), numbers)
    assert not found_in_a_step(strategy, for_each_pixel, numbers, ((1, 2**22), "float32"))
