"""What `trainer.step` refuses, and how its loop ends."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import ConfigError
from tfdist.monitoring import Throughput

X = np.arange(20, dtype=np.float32)[:, None] / 20


@pytest.fixture(scope="module")
def made(mirrored):
    trainer = tfdist.Trainer(mirrored)
    with trainer.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        optimizer = keras.optimizers.SGD(0.1)

    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 2 * x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    return trainer, model, optimizer, train


def test_a_loop_ends_where_it_is_told_to(made):
    keras.utils.set_random_seed(1)  # orders the batches
    trainer, model, optimizer, train = made
    step = trainer.step(train, uses=[model, optimizer])
    for number, batch in enumerate(step.loop(X, batch_size=4, epochs=9), 1):
        first = step(batch)["loss"]
        if number == 7:
            step.model.stop_training = True
    assert number == 7
    for batch in step.loop(X, batch_size=4, epochs=9):
        step(batch)
        break
    assert not trainer.is_at_work
    seen = Throughput(4)
    for batch in step.loop(X, batch_size=4, epochs=8, callbacks=[seen]):
        last = step(batch)["loss"]
    assert seen.steps == 40 and last < first / 2


def test_a_step_outside_of_a_loop_takes_a_whole_batch(made):
    trainer, model, optimizer, train = made
    before = [weight.numpy() for weight in model.weights]
    found = trainer.step(train, uses=[model, optimizer])(X)["loss"]
    errors = X * before[0][0, 0] + before[1][0] - 2 * X
    assert found == pytest.approx(float(np.square(errors).mean()), rel=1e-5)
    assert model.weights[1].numpy() == pytest.approx(before[1] - 0.1 * 2 * errors.mean(), rel=1e-5)


def test_what_is_wrong_is_said(made):
    trainer, model, optimizer, train = made
    with pytest.raises(ConfigError, match=r"uses must hold each optimizer .* Received: \[<Sequential"):
        trainer.step(train, uses=[model])
    with pytest.raises(ConfigError, match="takes a function and, as `uses`, a list"):
        trainer.step(train, uses=model)
    with pytest.raises(ConfigError, match=r"The step 'none' must return logs.*Received: NoneType"):

        def none(batch):
            train(batch)

        trainer.step(none, uses=[model, optimizer])(X)
    with pytest.raises(ConfigError, match="created outside of this trainer's scope"):
        trainer.step(train, uses=[keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), optimizer])
    with warnings.catch_warnings(), pytest.raises(ConfigError, match="hold no batch"):
        warnings.filterwarnings("ignore", "Your input ran out of data")  # which Keras says before 3.16
        for batch in trainer.step(train, uses=[model, optimizer]).loop(X[:0]):
            pytest.fail(f"there is no {batch}")
    with trainer.scope():
        other = keras.optimizers.SGD(0.1)

    def unknown(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch))
        other.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    with pytest.raises(ConfigError, match="applies an optimizer that the model does not hold"):
        trainer.step(unknown, uses=[model, optimizer])(X)
