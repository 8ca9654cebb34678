"""Replicas hold equal weights after a training, or a sentence says why they would not."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

rng = np.random.default_rng(0)
X = rng.standard_normal((64, 3)).astype(np.float32)
Y = rng.standard_normal((64, 1)).astype(np.float32)
RATE = 0.1


class Counter(keras.layers.Layer):
    def __init__(self, increment):
        super().__init__()
        self.increment = increment

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def call(self, x):
        self.count.assign_add(self.increment(x))
        return x


def examples(x):
    return tf.shape(x)[0]


def counting(trainer, increment, **compiled):
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), Counter(increment), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(RATE), "mse", **compiled)
    return model


@pytest.mark.parametrize("rows", [64, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "compiled",
    [
        {},
        *(
            pytest.param(compiled, marks=pytest.mark.full)
            for compiled in ({"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 2})
        ),
    ],
)
def test_a_count_of_examples_is_refused_also_in_full_batches(mirrored, rows, compiled):
    trainer = tfdist.Trainer(mirrored)
    model = counting(trainer, examples, **compiled)
    with pytest.raises(tfdist.ConfigError, match=r"The integer weight .*counter.* is assigned"):
        trainer.fit(model, X[:rows], Y[:rows], batch_size=16, verbose=0)


@pytest.mark.parametrize("way", ["predict", "bare", pytest.param("evaluate", marks=pytest.mark.full)])
def test_a_count_of_examples_is_refused_outside_of_a_training_too(mirrored, way):
    trainer = tfdist.Trainer(mirrored)
    model = counting(trainer, examples)
    ways = {
        "predict": lambda: trainer.predict(model, X, batch_size=16, verbose=0),
        "evaluate": lambda: trainer.evaluate(model, X, Y, batch_size=16, verbose=0),
        "bare": lambda: model.train_on_batch(X[:16], Y[:16]),
    }
    with pytest.raises(tfdist.ConfigError, match="The integer weight"):
        ways[way]()


def test_a_count_of_calls_is_left_alone_and_changes_no_other_weight(mirrored):
    trainer = tfdist.Trainer(mirrored)
    model = counting(trainer, lambda x: 1)
    kernel, bias = model.layers[-1].get_weights()
    history = trainer.fit(model, X, Y, batch_size=16, shuffle=False, verbose=0).history
    losses = []
    for i in range(0, 64, 16):
        x, error = X[i : i + 16], X[i : i + 16] @ kernel + bias - Y[i : i + 16]
        losses.append((error**2).mean())
        kernel, bias = kernel - RATE * 2 * x.T @ error / 16, bias - RATE * 2 * error.mean(0)
    assert int(model.layers[0].count.numpy()) == 4
    np.testing.assert_allclose(model.layers[-1].get_weights()[0], kernel, rtol=0, atol=1e-6)
    np.testing.assert_allclose(history["loss"], [np.mean(losses)], rtol=1e-6)


class ByHand(keras.Model):
    """A linear model of which a step descends by itself, and clips."""

    def __init__(self, average):
        super().__init__()
        self.average = average
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        for variable, gradient in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            if self.average:
                gradient = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradient)
            variable.assign_sub(RATE * gradient)
            variable.assign(tf.clip_by_value(variable, -0.5, 0.5))
        return {"loss": loss}


def by_hand(trainer, average, **compiled):
    with trainer.scope():
        model = ByHand(average)
        model.build((None, 3))
        model.compile(**compiled)
    return model


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("compiled", [{}, pytest.param({"run_eagerly": True}, marks=pytest.mark.full)])
def test_weights_that_replicas_update_by_hand_are_those_of_one_process(mirrored, average, compiled):
    """With the gradient of the tape, which is the batch's, or with its mean over the replicas."""
    trainer = tfdist.Trainer(mirrored)
    model = by_hand(trainer, average, **compiled)
    kernel, bias = model.get_weights()
    trainer.fit(model, X, Y, batch_size=16, shuffle=False, verbose=0)
    for i in range(0, 64, 16):
        x, error = X[i : i + 16], X[i : i + 16] @ kernel + bias - Y[i : i + 16]
        kernel = np.clip(kernel - RATE * 2 * x.T @ error / 16, -0.5, 0.5)
        bias = np.clip(bias - RATE * 2 * error.mean(0), -0.5, 0.5)
    for found, expected in zip(model.get_weights(), (kernel, bias), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_weights_set_outside_of_replicas_are_left_alone(mirrored):
    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for variable in self.model.trainable_variables:
                variable.assign(variable / 2)
            self.model.layers[0].count.assign(epoch)

    trainer = tfdist.Trainer(mirrored)
    model = counting(trainer, lambda x: 1)
    trainer.fit(model, X, Y, epochs=2, batch_size=32, verbose=0, callbacks=[Halve()])
    assert int(model.layers[0].count.numpy()) == 1


class Unseeded(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient + rng.standard_normal(gradient.shape).astype("float32"), variable, learning_rate)


def test_an_update_that_differs_between_replicas_ends_the_training(mirrored):
    trainer = tfdist.Trainer(mirrored)
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(Unseeded(RATE), "mse")
    with pytest.raises(tfdist.ConfigError, match=r"The weight .*kernel is not the same .* the optimizer's update"):
        trainer.fit(model, X, Y, batch_size=16, verbose=0)
