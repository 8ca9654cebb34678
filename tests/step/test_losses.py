"""Losses and logs of a batch that two replicas share, against the arithmetic of the whole batch."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers

rng = np.random.default_rng(0)
X = rng.standard_normal((40, 6)).astype(np.float32)
Y = rng.standard_normal((40, 1)).astype(np.float32)
RATE = 0.01


@pytest.fixture(scope="module", params=tiers.cases(["one_device", "mirrored"], quick=["mirrored"]))
def trainer(request, mirrored):
    return tfdist.Trainer(mirrored if request.param == "mirrored" else request.param)


class Weights:
    """Of a linear model, and what gradient descent makes of them."""

    def __init__(self):
        self.w, self.b = np.zeros((6, 1)), np.zeros(1)

    def error(self, rows):
        return X[rows].astype(np.float64) @ self.w + self.b - Y[rows]

    def descend(self, rows, sums):
        """A step along the gradient of the squared errors' sum or mean."""
        error = 2 * self.error(rows) / (1 if sums else len(rows))
        self.w, self.b = self.w - RATE * X[rows].T @ error, self.b - RATE * error.sum(0)


def passes(size, batch, epochs, sums=False):
    """Returns the weights after gradient descent, and each epoch's mean of batches' losses over examples."""
    weights, logs = Weights(), []
    for _ in range(epochs):
        seen = []
        for first in range(0, size, batch):
            rows = np.arange(first, min(first + batch, size))
            each = weights.error(rows) ** 2
            seen.append((each.sum() if sums else each.mean(), len(rows)))
            weights.descend(rows, sums)
        logs.append(np.average([value for value, _ in seen], weights=[count for _, count in seen]))
    return weights, logs


def linear():
    return keras.layers.Dense(1, kernel_initializer="zeros")


def compiled(model, loss="mse", **options):
    model.compile(keras.optimizers.SGD(RATE), loss, **options)
    return model


class Added(keras.layers.Layer):
    """Adds a loss of its own: a vector, or one number."""

    def __init__(self, reduce):
        super().__init__()
        self._reduce = reduce

    def call(self, y, out):
        self.add_loss(self._reduce((out - y) ** 2))
        return out


def adding(reduce):
    x, y = keras.Input((6,)), keras.Input((1,))
    return compiled(keras.Model([x, y], Added(reduce)(y, linear()(x))), None)


@pytest.mark.parametrize(
    ("size", "jit"), tiers.cases([(33, False), (32, False), (27, True)], quick=1)
)  # of 33 a replica's last batch is empty
def test_a_vector_that_a_layer_adds_is_summed_over_the_batch(trainer, size, jit):
    with trainer.scope():
        model = adding(lambda vector: vector)
        model.jit_compile = jit
    data = [X[:size], Y[:size]]
    history = trainer.fit(
        model,
        data,
        batch_size=16,
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(data,),
        validation_batch_size=16,
    ).history
    weights, logs = passes(size, 16, 2, sums=True)
    np.testing.assert_allclose(model.get_weights()[0], weights.w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(history["loss"], logs, rtol=1e-4)
    rows = [np.arange(first, min(first + 16, size)) for first in range(0, size, 16)]
    expected = np.average([(weights.error(each) ** 2).sum() for each in rows], weights=list(map(len, rows)))
    np.testing.assert_allclose(history["val_loss"][-1], expected, rtol=1e-4)


class OneNumber(keras.losses.Loss):
    def call(self, y, out):
        return tf.reduce_mean((y - out) ** 2)


@pytest.mark.filterwarnings("ignore:The layer .* adds a scalar loss")
@pytest.mark.parametrize(
    "kind", tiers.cases(["function", "added", "object"], quick=2)
)  # test_loss_divisors.py has Dice
@pytest.mark.parametrize("size", tiers.cases([33, 29], quick=1))
def test_logs_of_one_number_are_means_over_examples(trainer, kind, size):
    with trainer.scope():
        if kind == "added":
            model = adding(lambda vector: tf.reduce_mean(vector))
        else:
            loss = OneNumber() if kind == "object" else lambda y, out: tf.reduce_mean((y - out) ** 2)
            model = compiled(keras.Sequential([keras.Input((6,)), linear()]), loss)
    data = ([X[:size], Y[:size]],) if kind == "added" else (X[:size], Y[:size])
    history = trainer.fit(model, *data, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    weights, logs = passes(size, 16, 2)
    np.testing.assert_allclose(model.get_weights()[0], weights.w, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(history["loss"], logs, rtol=1e-5)
    evaluated = trainer.evaluate(model, *data, batch_size=16, verbose=0)
    np.testing.assert_allclose(evaluated, (weights.error(np.arange(size)) ** 2).mean(), rtol=1e-5)


class OwnStep(keras.Sequential):
    """Takes the mean of the compiled loss itself."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(self.loss(y, self(x, training=True)))
        self.optimizer.apply(tape.gradient(value, self.trainable_variables), self.trainable_variables)
        return {"value": value}


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(self.loss(y, y_pred))


@pytest.mark.parametrize(
    ("kind", "reduction"),
    tiers.cases(itertools.product([OwnStep, OwnLoss], ["none", None]), quick=[(OwnStep, "none"), (OwnLoss, None)]),
)
def test_the_mean_of_an_unreduced_loss_is_a_mean(trainer, kind, reduction):
    with trainer.scope():
        model = compiled(kind([keras.Input((6,)), linear()]), keras.losses.MeanSquaredError(reduction=reduction))
    trainer.fit(model, X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], passes(40, 16, 2)[0].w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", tiers.cases(["none", None, "sum"], quick=["none", "sum"]))
def test_a_loss_that_is_not_reduced_is_summed(trainer, reduction):
    with trainer.scope():
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model = compiled(keras.Sequential([keras.Input((6,)), linear()]), loss)
    trainer.fit(model, X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], passes(40, 16, 2, sums=True)[0].w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("steps", "size"), tiers.cases([(1, 33), (3, 40), (3, 33)], quick=2))
def test_losses_of_single_outputs_are_means_over_examples(trainer, steps, size):
    with trainer.scope():
        x = keras.Input((6,))
        model = keras.Model(x, {name: keras.layers.Dense(1, name=name)(x) for name in "ab"})
        losses = {"a": "mse", "b": lambda y, out: tf.reduce_mean(tf.abs(y - out))}
        model.compile(keras.optimizers.SGD(0.0), losses, steps_per_execution=steps)
    x, y = X[:size], {"a": Y[:size], "b": Y[:size]}
    out = model.predict_step((X,))
    errors = {name: y[name] - out[name].numpy()[:size] for name in "ab"}
    expected = {"a_loss": (errors["a"] ** 2).mean(), "b_loss": np.abs(errors["b"]).mean()}
    expected["loss"] = sum(expected.values())
    fit = {"batch_size": 16, "shuffle": False, "verbose": 0, "validation_batch_size": 16}
    history = trainer.fit(model, x, y, validation_data=(x, y), **fit).history
    evaluated = trainer.evaluate(model, x, y, batch_size=16, verbose=0, return_dict=True)
    for name, value in expected.items():
        for found in (history[name][0], history[f"val_{name}"][0], evaluated[name]):
            np.testing.assert_allclose(found, value, rtol=1e-5, err_msg=name)
