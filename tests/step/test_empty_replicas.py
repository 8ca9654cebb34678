"""Batches that leave a replica without an example."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tests.helpers.dense_model import build


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


@pytest.mark.filterwarnings("ignore:The layer .* adds a scalar loss")
def test_a_lazily_built_model_takes_an_odd_batch_of_inputs_alone(trainer):
    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            y = self.dense(x)
            self.add_loss(keras.ops.mean((y - x) ** 2))
            return y

    with trainer.scope():
        model = Autoencoder()
        model.compile("sgd")
    dataset = tf.data.Dataset.from_tensor_slices(np.ones((5, 3), np.float32)).batch(5)
    assert np.isfinite(trainer.fit(model, dataset, verbose=0).history["loss"]).all()


STARVING = {
    "arrays": lambda x, y: (x, y),
    "dataset": lambda x, y: (tf.data.Dataset.from_tensor_slices((x, y)).batch(32),),
    "generator": lambda x, y: (((x[i : i + 32], y[i : i + 32]) for i in (0, 32)),),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # as Keras says of any generator
@pytest.mark.parametrize(
    ("built", "kind"),
    tiers.cases(itertools.product([True, False], STARVING), quick=[(True, "arrays"), (False, "generator")]),
)
def test_an_empty_share_of_a_batch_never_makes_nan_of_batch_norm(trainer, kind, built):
    with trainer.scope():
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers] if built else layers)
        model.compile("sgd", "mse")
    x, y = np.ones((33, 3), np.float32), np.ones((33, 1), np.float32)
    trainer.fit(model, *STARVING[kind](x, y), verbose=0)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    # Ones less their mean: what the last example alone moves is what all move.
    assert model.layers[0].moving_mean.numpy() == pytest.approx(np.full(3, 1 - 0.99**2), abs=1e-6)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_an_empty_share_trains_what_there_is(trainer, compiled):
    """The mean of nothing is NaN, and does not count."""

    def mean(y, predictions):
        return tf.reduce_mean((y - predictions) ** 2)

    model = build(trainer, loss="mse" if compiled else lambda: mean, jit_compile=compiled)
    before = model.get_weights()
    trainer.fit(model, np.ones((1, 3), np.float32), np.ones((1, 2), np.float32), verbose=0)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    assert (before[0] != model.get_weights()[0]).any()
