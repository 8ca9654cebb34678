"""Losses of custom steps and layers, and what replicas cannot compute together: arithmetic over the whole batch, or a sentence."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tests.helpers.options import options_set
from tests.step.test_loss_divisors import (
    BATCH,
    RATE,
    SIZE,
    Adds,
    X,
    Y,
    mean,
    ranked,
    square_loss,
    sum_of_squares,
    total,
)
from tfdist.errors import ConfigError


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


def linear():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def descend(model, loss, rate):
    """Takes a step of plain gradient descent along the gradient of `loss()`."""
    with tf.GradientTape() as tape:
        value = loss()
    for variable, grad in zip(model.trainable_variables, tape.gradient(value, model.trainable_variables), strict=True):
        variable.assign_sub(rate * grad)


def check_weights(model, plain):
    for found, right in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=2e-6)


def test_circle_loss_of_each_example_is_refused(trainer):
    with trainer.scope():
        model = linear()
        model.compile("sgd", keras.losses.Circle(reduction="none"))
    with pytest.raises(
        ConfigError, match="The loss circle depends on all examples of a batch and returns a value for each"
    ):
        trainer.fit(model, X, Y[:, :1], batch_size=BATCH, verbose=0)


def dataset_of(context):
    """Batches of this worker's own, whose sizes the other replica does not know."""
    parts = [X[:5], X[5:8], X[8:9], X[9:16], X[16:17], X[16:17]]
    targets = [Y[:5], Y[5:8], Y[8:9], Y[9:16], Y[16:17], Y[16:17]]
    return tf.data.Dataset.from_generator(
        lambda: iter(zip(parts, targets, strict=True)),
        output_signature=(tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])),
    )


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_number_of_datasets_of_functions_sees_the_batches_of_all_replicas(trainer):
    with trainer.scope():
        model = linear()
        model.compile(keras.optimizers.SGD(RATE), ranked)
    plain = linear()
    plain.set_weights(model.get_weights())
    trainer.fit(model, dataset_of, verbose=0)
    for rows in (slice(0, 8), slice(8, 16), [16, 16]):
        descend(plain, lambda: ranked(Y[rows], plain(X[rows])), RATE)  # noqa: B023
    check_weights(model, plain)


@pytest.mark.parametrize(
    ("limit", "compiled", "why"),
    [
        (15, {}, "16 bytes of an example are more than strategy.gather_loss_bytes \\(15\\); raise it"),
        pytest.param(
            *(16, {"jit_compile": True}, "XLA, which jit_compile=True asks for, compiles no collectives"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_where_the_batch_is_not_gathered_the_mean_is_trained_and_said(trainer, limit, compiled, why):
    with trainer.scope():
        model = linear()
        model.compile(keras.optimizers.SGD(0.0), total, **compiled)
    warned = pytest.warns(UserWarning, match=f"The loss total returns one number .*: {why}")
    with options_set(trainer.strategy, gather_loss_bytes=limit), warned as said:
        history = trainer.fit(model, X[:16], Y[:16], batch_size=16, epochs=2, verbose=0).history
    assert len([each for each in said if "The loss total" in str(each.message)]) == 1
    assert history["loss"] == pytest.approx([float(total(Y[:16], model(X[:16]))) / 2] * 2, rel=1e-5)


def test_rows_that_are_no_examples_are_refused(trainer):
    def twice(y, p):
        return tf.reduce_sum(p[: tf.shape(p)[0] // 2] * p[tf.shape(p)[0] // 2 :])

    with trainer.scope():
        x = keras.Input((3,))
        model = keras.Model(x, keras.layers.Lambda(lambda v: tf.concat([v, -v], 0))(keras.layers.Dense(2)(x)))
        model.compile("sgd", twice)
    with pytest.raises(ConfigError, match=r"Each row of its y_true, y_pred and sample_weight must be an example"):
        trainer.fit(model, X, Y, batch_size=BATCH, verbose=0)


def test_a_number_that_does_not_depend_on_the_data_is_not_said(trainer):
    class Own(keras.layers.Dense):
        def call(self, x):
            self.add_loss(0.1 * tf.reduce_sum(self.kernel**2))
            return super().call(x)

    with trainer.scope():
        regular = [keras.layers.Dense(2, **{name: "l2"}) for name in ("kernel_regularizer", "activity_regularizer")]
        model = keras.Sequential([keras.Input((3,)), *regular, Own(2)])
        model.compile("sgd", "mse")
    trainer.fit(model, X[:16], Y[:16], batch_size=16, verbose=0)  # a warning would be an error


def test_a_loss_with_a_state_is_computed_once_a_step(trainer):
    """A moving centre, as of self-distillation, and a count of the calls."""

    class Centre(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.centre = tf.Variable(tf.zeros(2), trainable=False, aggregation=tf.VariableAggregation.MEAN)
            self.calls = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

        def call(self, y, p):
            self.calls.assign_add(1.0)
            value = tf.reduce_mean((p - self.centre) ** 2)
            self.centre.assign(0.9 * self.centre + 0.1 * tf.reduce_mean(y, 0))
            return value

    with trainer.scope():
        model, loss = linear(), Centre()
        model.compile(keras.optimizers.SGD(0.0), loss)
    trainer.fit(model, X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    assert float(loss.calls.numpy()) == 2
    expected = 0.9 * 0.1 * Y[:8].mean(0) + 0.1 * Y[8:16].mean(0)
    np.testing.assert_allclose(loss.centre.numpy(), expected, rtol=1e-5)


def test_a_layer_that_adds_a_number_is_named_once_and_called_once_a_step(trainer):
    class Counts(Adds):
        def build(self, shape):
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)
            self.seed = keras.random.SeedGenerator(3)

        def call(self, x):
            self.calls.assign_add(1.0)
            return super().call(x + 0 * keras.random.normal((), seed=self.seed))

    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Counts(tf.reduce_sum)])
        model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"The layer counts.* adds a scalar loss .*treated as a mean") as said:
        trainer.fit(model, X[:16], Y[:16], batch_size=BATCH, verbose=0)
        assert float(model.layers[1].calls.numpy()) == 2
        trainer.evaluate(model, X[:16], Y[:16], batch_size=16, verbose=0)
    assert len([each for each in said if "adds a scalar loss" in str(each.message)]) == 1


class OwnStep(keras.Sequential):
    """Trains on a sum that it declares, and logs a mean, too."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x, training=True) - y
            loss = tfdist.total(tf.reduce_sum(error**2))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"total": loss, "mean": tf.reduce_mean(error**2)}


def test_a_train_step_declares_its_sum_and_logs_a_mean_over_examples(trainer):
    with trainer.scope():
        model = OwnStep([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01))
    plain = linear()
    plain.set_weights(model.get_weights())
    history = trainer.fit(model, X[:13], Y[:13], batch_size=8, shuffle=False, verbose=0).history
    for rows in (slice(0, 8), slice(8, 13)):
        error = plain(X[rows]) - Y[rows]
        descend(plain, lambda: total(Y[rows], plain(X[rows])), 0.01)  # noqa: B023
    check_weights(model, plain)
    assert history["total"] == pytest.approx([np.sum(error**2)], rel=1e-5)
    assert history["mean"] == pytest.approx([np.mean(error**2)], rel=1e-5)


class MeanInStep(keras.Sequential):
    """Takes the mean of the compiled loss itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(self.loss(y, self(x, training=True)))
        self.optimizer.apply(tape.gradient(value, self.trainable_variables), self.trainable_variables)
        return {"value": value}


class MeanInLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(self.loss(y, y_pred))


UNREDUCED = {
    keras.Sequential: sum_of_squares,  # Keras' own step sums what is not reduced
    MeanInStep: mean,
    MeanInLoss: mean,
}


@pytest.mark.parametrize(
    ("kind", "reduction"),
    tiers.cases(
        itertools.product(UNREDUCED, ["none", None]),
        quick=[(keras.Sequential, "none"), (MeanInStep, "none"), (MeanInLoss, None)],
    ),
)
def test_an_unreduced_loss_is_summed_and_its_mean_is_a_mean(trainer, kind, reduction):
    with trainer.scope():
        model = kind([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(RATE), square_loss(reduction))
    plain = linear()
    plain.set_weights(model.get_weights())
    trainer.fit(model, X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for begin in range(0, SIZE, BATCH):
        rows = slice(begin, begin + BATCH)
        descend(plain, lambda: UNREDUCED[kind](Y[rows], plain(X[rows])), RATE)  # noqa: B023
    check_weights(model, plain)
