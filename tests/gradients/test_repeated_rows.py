"""Rows of one id that come several times in a batch: their sum is the gradient, as it is of dense numbers."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers

rng = np.random.default_rng(0)
IDS = np.array([[1, 1, 1, 3], [1, 3, 3, 2], [2, 2, 2, 2], [0, 1, 1, 0]] * 2, np.int32)
TARGETS = rng.standard_normal((8, 1)).astype(np.float32)
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.1),
    "amsgrad": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipped": lambda: keras.optimizers.SGD(0.1, clipnorm=0.01),
    "clipped_by_all": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
}


def build(optimizer):
    keras.utils.set_random_seed(1)
    table, head = keras.layers.Embedding(5, 3), keras.layers.Dense(1)
    inputs = keras.Input((4,), dtype="int32")
    model = keras.Model(inputs, head(keras.ops.sum(table(inputs), 1)))
    model.compile(optimizer() if callable(optimizer) else optimizer, "mse")
    return model


@functools.cache
def trained_dense(name, steps, batch=8):
    """Returns the weights after steps of a plain loop, whose gradients are dense."""
    model = build(OPTIMIZERS[name])
    for step in range(steps):
        rows = slice(step * batch % 8, step * batch % 8 + batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(IDS[rows]) - TARGETS[rows]) ** 2)
        grads = tape.gradient(loss, [v.value for v in model.trainable_variables])
        assert isinstance(grads[0], tf.IndexedSlices)
        model.optimizer.apply([tf.convert_to_tensor(grad) for grad in grads], model.trainable_variables)
    return model.get_weights()


@pytest.mark.full
def test_keras_alone_does_not():
    """Where this fails, Keras sums rows itself."""
    model = build(OPTIMIZERS["adam"])
    model.fit(IDS, TARGETS, batch_size=8, epochs=3, shuffle=False, verbose=0)
    assert np.abs(model.get_weights()[0] - trained_dense("adam", 3)[0]).max() > 0.01


@pytest.fixture(scope="module", params=tiers.cases(["one_device", "mirrored", "central_storage"], quick=["mirrored"]))
def trainer(request, mirrored):
    if request.param == "mirrored":
        return tfdist.Trainer(mirrored)
    return tfdist.Trainer(request.param, **({"devices": 2} if request.param == "central_storage" else {}))


@pytest.mark.parametrize("name", tiers.cases(OPTIMIZERS, quick=["clipped_by_all"]))
def test_the_trainer_trains_as_dense_gradients_do(trainer, name):
    with trainer.scope():
        model = build(OPTIMIZERS[name])
    if name == "nadam" and isinstance(trainer.strategy, tf.distribute.experimental.CentralStorageStrategy):
        with pytest.raises(tfdist.ConfigError, match="Nadam is not possible with central_storage"):
            trainer.fit(model, IDS, TARGETS, verbose=0)
        return
    trainer.fit(model, IDS, TARGETS, batch_size=8, epochs=3, shuffle=False, verbose=0)
    for mine, dense in zip(model.get_weights(), trained_dense(name, 3), strict=True):
        np.testing.assert_allclose(mine, dense, atol=2e-6)


def test_steps_of_one_execution_may_have_different_numbers_of_rows(trainer):
    with trainer.scope():
        model = build(OPTIMIZERS["adam"])
        model.compile(model.optimizer, "mse", steps_per_execution=4)
    trainer.fit(model, IDS, TARGETS, batch_size=2, shuffle=False, verbose=0)
    for mine, dense in zip(model.get_weights(), trained_dense("adam", 4, batch=2), strict=True):
        np.testing.assert_allclose(mine, dense, atol=2e-6)


def test_rows_of_a_scaled_loss_are_scaled_back(trainer):
    """Keras alone cannot: it divides a gradient, and rows cannot be divided."""
    with trainer.scope():
        model = build(keras.optimizers.Adam(0.1, loss_scale_factor=3.0))
    trainer.fit(model, IDS, TARGETS, batch_size=8, epochs=3, shuffle=False, verbose=0)
    for mine, dense in zip(model.get_weights(), trained_dense("adam", 3), strict=True):
        np.testing.assert_allclose(mine, dense, atol=2e-6)


def test_adam_is_its_formula(trainer):
    table = np.zeros((4, 2), np.float32)
    first = second = np.zeros_like(table)
    ids = np.array([1, 1, 3, 1], np.int32)
    for step in (1, 2, 3):
        grad = np.zeros_like(table)
        np.add.at(grad, ids, 0.25)  # of the mean over four examples, of a sum over two columns
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        table -= 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * first / (np.sqrt(second) + 1e-7)
    with trainer.scope():
        inputs = keras.Input((), dtype="int32")
        outputs = keras.layers.Embedding(4, 2, embeddings_initializer="zeros")(inputs)
        model = keras.Model(inputs, keras.ops.sum(outputs, -1, keepdims=True))
        model.compile(keras.optimizers.Adam(0.1), lambda y, out: out)
    trainer.fit(model, ids, np.zeros((4, 1), np.float32), batch_size=4, epochs=3, shuffle=False, verbose=0)
    np.testing.assert_allclose(model.get_weights()[0], table, atol=5e-6)  # an id's rows unsummed: 0.17 a step


@pytest.mark.parametrize(
    ("compression", "name"),
    tiers.cases(itertools.product([None, "bf16"], ["adam", "rmsprop"]), quick=[("bf16", "adam")]),
)
def test_a_distributed_optimizer_trains_as_dense_gradients_do(mirrored, name, compression):
    with mirrored.scope():
        model = build(tfdist.distribute_optimizer(OPTIMIZERS[name](), compression))
    model.fit(IDS, TARGETS, batch_size=8, epochs=3, shuffle=False, verbose=0)
    tolerance = 2e-6 if compression is None else 0.02  # one row of an id unsummed is off by 0.1
    for mine, dense in zip(model.get_weights(), trained_dense(name, 3), strict=True):
        np.testing.assert_allclose(mine, dense, atol=tolerance)


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras has it since 3.15")
def test_a_multi_optimizer_on_one_device():
    trainer = tfdist.Trainer("one_device")
    with trainer.scope():
        adam = OPTIMIZERS["adam"]()
        model = build(keras.optimizers.MultiOptimizer(functools.partial(lambda adam, _: adam, adam)))
    trainer.fit(model, IDS, TARGETS, batch_size=8, epochs=3, shuffle=False, verbose=0)
    for mine, dense in zip(model.get_weights(), trained_dense("adam", 3), strict=True):
        np.testing.assert_allclose(mine, dense, atol=2e-6)


def test_half_precision_counts_each_id_once():
    trainer = tfdist.Trainer("one_device")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with trainer.scope():
            model = build(OPTIMIZERS["adam"])
    finally:
        keras.config.set_dtype_policy("float32")
    trainer.fit(model, IDS, TARGETS, batch_size=8, epochs=3, shuffle=False, verbose=0)
    for mine, dense in zip(model.get_weights(), trained_dense("adam", 3), strict=True):
        np.testing.assert_allclose(mine, dense, atol=0.02)
