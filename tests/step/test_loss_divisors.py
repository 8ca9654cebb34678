"""Whatever a loss is divided by, two replicas train what arithmetic over the whole batch does."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tfdist.errors import ConfigError

RATE, BATCH, EPOCHS = 0.1, 8, 2
rng = np.random.default_rng(0)
SIZE = 17  # the last batch leaves a replica without an example
X = rng.standard_normal((SIZE, 3)).astype(np.float32)
Y = rng.standard_normal((SIZE, 2)).astype(np.float32)
WORDS = np.where(rng.random((SIZE, 5)) < 0.5, 0, rng.integers(1, 7, (SIZE, 5)))
WORDS[:3] = 0  # nothing to see
TAGS = rng.integers(0, 4, (SIZE, 5))
WEIGHTS = rng.uniform(0, 2, SIZE).astype(np.float32)
WEIGHTS[4:8] = 0  # all of one replica
STEPS = rng.uniform(0, 2, (SIZE, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


def dense():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def tagger():
    return keras.Sequential([keras.Input((5,)), keras.layers.Embedding(7, 3, mask_zero=True), keras.layers.Dense(4)])


def both():
    words, x = keras.Input((5,)), keras.Input((3,))
    tags = keras.layers.Dense(4, name="tags")(keras.layers.Embedding(7, 3, mask_zero=True)(words))
    return keras.Model([words, x], [tags, keras.layers.Dense(2, name="rest")(x)])


def cross_entropy(tags, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tags, logits)


def squares(y, p):
    return tf.reduce_mean((y - p) ** 2, -1)


def tag_loss(reduction="sum_over_batch_size"):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def seen(words):
    return tf.cast(words != 0, tf.float32)


def ratio(a, b):
    return tf.math.divide_no_nan(tf.reduce_sum(a), tf.reduce_sum(b))


def masked(model, words, tags, weights=None):
    weights = 1.0 if weights is None else weights
    return ratio(cross_entropy(tags, model(words)) * seen(words) * weights, seen(words))


def by_weight(model, words, tags, weights):
    return ratio(cross_entropy(tags, model(words)) * seen(words) * weights, seen(words) * weights)


def weighted(model, x, y, weights):
    return ratio(squares(y, model(x)) * weights, weights)


def two_outputs(model, inputs, targets):
    words, x = inputs
    tags, rest = model([words, x])
    first = ratio(cross_entropy(targets[0], tags) * seen(words), seen(words))
    return 2.0 * first + 0.5 * tf.reduce_sum(squares(targets[1], rest))


class Adds(keras.layers.Layer):
    """Adds a loss of its own."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def call(self, x):
        self.add_loss(self.what(x))
        return x


def adding(what, **dense):
    return lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, **dense), Adds(what)])


def plus(what, regularizer=False):
    def loss(model, x, y):
        p = model.layers[0](x)
        rest = 0.01 * tf.reduce_sum(model.layers[0].kernel ** 2) if regularizer else 0.0
        return tf.reduce_mean(squares(y, p)) + tf.reduce_sum(what(p)) + rest

    return loss


def total(y, p):
    return tf.reduce_sum((y - p) ** 2)


def mean(y, p):
    return tf.reduce_mean((y - p) ** 2)


CASES = {
    "masks": (tagger, tag_loss(), masked, (WORDS, TAGS)),
    "masks and weights of steps": (tagger, tag_loss(), masked, (WORDS, TAGS, STEPS)),
    "masks and means over weights": (tagger, tag_loss("mean_with_sample_weight"), by_weight, (WORDS, TAGS, STEPS)),
    "means over weights": (dense, keras.losses.MeanSquaredError("mean_with_sample_weight"), weighted, (X, Y, WEIGHTS)),
    "a sum beside a masked mean": (
        both,
        [tag_loss(), keras.losses.MeanSquaredError("sum")],
        two_outputs,
        ([WORDS, X], [TAGS, Y]),
    ),
    "a sum": (dense, keras.losses.MeanSquaredError("sum"), lambda m, x, y: tf.reduce_sum(squares(y, m(x))), (X, Y)),
    "a function's sum": (dense, total, lambda m, x, y: total(y, m(x)), (X, Y)),
    "a function's mean": (dense, mean, lambda m, x, y: mean(y, m(x)), (X, Y)),
    "an added sum": (adding(tf.reduce_sum), "mse", plus(tf.reduce_sum), (X, Y)),
    "an added mean": (adding(tf.reduce_mean), "mse", plus(tf.reduce_mean), (X, Y)),
    "an added vector": (adding(lambda p: p[:, 0] ** 2), "mse", plus(lambda p: p[:, 0] ** 2), (X, Y)),
    "an added sum beside a regularizer": (
        adding(tf.reduce_sum, kernel_regularizer=keras.regularizers.L2(0.01)),
        "mse",
        plus(tf.reduce_sum, regularizer=True),
        (X, Y),
    ),
}
QUICK = ("masks and weights of steps", "means over weights", "a function's sum", "an added sum beside a regularizer")


def batches(data):
    for begin in range(0, SIZE, BATCH):
        yield tf.nest.map_structure(lambda each: tf.constant(each[begin : begin + BATCH]), list(data))  # noqa: B023


def loop(model, loss, data, accumulated=1):
    """Trains by plain arithmetic; returns the mean loss of each epoch over examples."""
    history, gathered, pending = [], None, 0
    for _ in range(EPOCHS):
        losses = []
        for batch in batches(data):
            with tf.GradientTape() as tape:
                value = loss(model, *batch)
            losses.append(float(value) * len(tf.nest.flatten(batch)[0]))
            grads = [tf.convert_to_tensor(g) for g in tape.gradient(value, model.trainable_variables)]
            gathered = grads if gathered is None else [a + b for a, b in zip(gathered, grads, strict=True)]
            pending += 1
            if pending == accumulated:
                for variable, grad in zip(model.trainable_variables, gathered, strict=True):
                    variable.assign_sub(RATE * grad / accumulated)
                gathered, pending = None, 0
        history.append(sum(losses) / SIZE)
    return history


def compare(trainer, case, accumulated=1, **compiled):
    build, given, arithmetic, data = CASES[case]
    weights = {"loss_weights": [2.0, 0.5]} if isinstance(given, list) else {}
    with trainer.scope():
        model = build()
        optimizer = keras.optimizers.SGD(RATE, gradient_accumulation_steps=accumulated if accumulated > 1 else None)
        model.compile(optimizer, given, **weights, **compiled)
    plain = build()
    plain.set_weights(model.get_weights())
    x, y, *sample_weight = data
    named = {"sample_weight": sample_weight[0]} if sample_weight else {}
    arguments = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    expected_first = sum(float(arithmetic(plain, *b)) * len(tf.nest.flatten(b)[0]) for b in batches(data)) / SIZE
    evaluated = trainer.evaluate(model, x, y, batch_size=BATCH, verbose=0, return_dict=True, **named)["loss"]
    history = trainer.fit(model, x, y, **arguments, **named).history["loss"]
    expected = loop(plain, arithmetic, data, accumulated)
    assert evaluated == pytest.approx(expected_first, rel=1e-5)
    assert history == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("case", tiers.cases(CASES, quick=QUICK))
def test_replicas_divide_together(trainer, case):
    compare(trainer, case)


@pytest.mark.parametrize("case", ["masks", "a sum beside a masked mean"])
def test_each_accumulated_step_is_a_mean_of_its_own(trainer, case):
    compare(trainer, case, accumulated=2)


def test_two_steps_of_an_execution_divide_apart(trainer):
    compare(trainer, "masks and weights of steps", steps_per_execution=2)


def test_sums_are_compiled(trainer):
    compare(trainer, "a sum", jit_compile=True)


def test_a_mask_cannot_be_compiled(trainer):
    build, loss, _, (words, tags) = CASES["masks"]
    with trainer.scope():
        model = build()
        model.compile("sgd", loss, jit_compile=True)
    with pytest.raises(ConfigError, match=r"a mean over what a mask or weights leave, .*jit_compile=False"):
        trainer.fit(model, words, tags, verbose=0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, p: tf.sqrt(tf.reduce_sum((y - p) ** 2)),
        keras.losses.Dice(),
        keras.losses.Tversky(reduction="sum"),
        lambda y, p: tf.math.reduce_variance(y - p),
    ],
)
def test_what_is_neither_a_sum_nor_a_mean_is_said(trainer, loss):
    with trainer.scope():
        model = dense()
        model.compile("sgd", loss)
    with pytest.warns(UserWarning, match=r"The loss .* is neither a sum nor a mean over examples: it is"):
        trainer.fit(model, X, Y, batch_size=BATCH, verbose=0)


def test_trying_a_model_leaves_no_trace(trainer):
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
    trainer.fit(model, X[:16], Y[:16], batch_size=BATCH, verbose=0)
    assert float(model.layers[1].calls.numpy()) == 2


@pytest.mark.parametrize("tail", [1, 5])
def test_a_train_steps_own_logs_are_means_over_examples(trainer, tail):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"mine": loss}

    with trainer.scope():
        model = Own()
        model.compile(keras.optimizers.SGD(0.0))
    x, y = X[: BATCH + tail], Y[: BATCH + tail]
    history = trainer.fit(model, x, y, batch_size=BATCH, shuffle=False, verbose=0).history
    assert history["mine"] == pytest.approx([np.mean((model(x[BATCH:]) - y[BATCH:]) ** 2)], rel=1e-6)
