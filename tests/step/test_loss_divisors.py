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


def overlap(y, p):
    """Dice, of all numbers of a batch together."""
    return 1 - 2 * tf.reduce_sum(y * p) / (tf.reduce_sum(y) + tf.reduce_sum(p))


def ranked(y, p):
    """A loss over pairs of neighbours, which depends on the order of the batch."""
    return tf.reduce_sum(tf.nn.relu(0.5 - (y[1:] - y[:-1]) * (p[1:] - p[:-1])))


def hinges(y, p):
    return tf.reduce_sum(tf.nn.relu(tf.norm(y - p, axis=-1) - 1.5))


def labelled(tags, logits):
    """The mean over tags other than 0."""
    tags = tf.cast(tags, tf.int32)
    return ratio(cross_entropy(tags, logits) * seen(tags), seen(tags))


class MasksItsValues(keras.losses.Loss):
    def call(self, tags, logits):
        tags = tf.cast(tags, tf.int32)
        values = cross_entropy(tags, logits)
        values._keras_mask = tags != 0
        return values


def of_outputs(loss):
    return lambda model, x, y: loss(y, model(x))


def of_tags(model, words, tags):
    return labelled(tags, model(words))


def unmasked():
    return keras.Sequential([keras.Input((5,)), keras.layers.Embedding(7, 3), keras.layers.Dense(4)])


def probabilities():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "sigmoid")])


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


def added_total(p):
    return tfdist.total(tf.reduce_sum(p))


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
    "a function's declared sum": (dense, lambda y, p: tfdist.total(total(y, p)), of_outputs(total), (X, Y)),
    "a function's sum of a declared sum and a mean": (
        dense,
        lambda y, p: tfdist.total(total(y, p)) + mean(y, p),
        of_outputs(lambda y, p: total(y, p) + mean(y, p)),
        (X, Y),
    ),
    "a function's vector": (dense, lambda y, p: squares(y, p), of_outputs(mean), (X, Y)),
    "a norm": (dense, lambda y, p: tf.norm(y - p), of_outputs(lambda y, p: tf.norm(y - p)), (X, Y)),
    "a variance": (
        dense,
        lambda y, p: tf.math.reduce_variance(y - p),
        of_outputs(lambda y, p: tf.math.reduce_variance(y - p)),
        (X, Y),
    ),
    "hinges that are 0 for most": (dense, hinges, of_outputs(hinges), (X, 3 * Y)),
    "neighbours of a batch": (dense, ranked, of_outputs(ranked), (X, Y)),
    "Dice": (probabilities, keras.losses.Dice(), of_outputs(overlap), (X, np.abs(Y))),
    "Tversky": (probabilities, keras.losses.Tversky(0.5, 0.5, reduction="sum"), of_outputs(overlap), (X, np.abs(Y))),
    "a number with weights": (
        dense,
        mean,
        lambda m, x, y, w: mean(y, m(x)) * tf.reduce_mean(w),
        (X, Y, WEIGHTS),
    ),
    "labels to ignore": (
        unmasked,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        of_tags,
        (WORDS, TAGS),
    ),
    "a mask on values": (unmasked, MasksItsValues(), of_tags, (WORDS, TAGS)),
    "a mean over labels": (unmasked, labelled, of_tags, (WORDS, TAGS)),
    "a number of masked predictions": (tagger, labelled, of_tags, (WORDS, TAGS)),
    "an added sum": (adding(added_total), "mse", plus(tf.reduce_sum), (X, Y)),
    "an added mean": (adding(tf.reduce_mean), "mse", plus(tf.reduce_mean), (X, Y)),
    "an added vector": (adding(lambda p: p[:, 0] ** 2), "mse", plus(lambda p: p[:, 0] ** 2), (X, Y)),
    "an added sum beside a regularizer": (
        adding(added_total, kernel_regularizer=keras.regularizers.L2(0.01)),
        "mse",
        plus(tf.reduce_sum, regularizer=True),
        (X, Y),
    ),
}
# test_two_steps_of_an_execution_divide_apart has two more.
QUICK = (
    "means over weights",
    "an added sum beside a regularizer",
    "Dice",
    "a mask on values",  # as Keras' losses have that ignore labels
    "a number of masked predictions",  # of a function
)


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


@pytest.mark.filterwarnings("ignore:The layer .* adds a scalar loss")
@pytest.mark.parametrize("case", tiers.cases(CASES, quick=QUICK))
def test_replicas_divide_together(trainer, case):
    compare(trainer, case)


@pytest.mark.parametrize("case", tiers.cases(["masks", "a sum beside a masked mean"], ["a sum beside a masked mean"]))
def test_each_accumulated_step_is_a_mean_of_its_own(trainer, case):
    compare(trainer, case, accumulated=2)


@pytest.mark.parametrize("case", ["masks and weights of steps", "neighbours of a batch"])
def test_two_steps_of_an_execution_divide_apart(trainer, case):
    compare(trainer, case, steps_per_execution=2)


@pytest.mark.parametrize("case", tiers.cases(["Dice", "a norm", "a function's vector", "labels to ignore"], quick=1))
def test_replicas_divide_together_eagerly(trainer, case):
    compare(trainer, case, run_eagerly=True)


def test_sums_are_compiled(trainer):
    compare(trainer, "a sum", jit_compile=True)


def test_a_mask_cannot_be_compiled(trainer):
    build, loss, _, (words, tags) = CASES["masks"]
    with trainer.scope():
        model = build()
        model.compile("sgd", loss, jit_compile=True)
    with pytest.raises(
        ConfigError, match=r"a mean over the values that a mask or weights select\. .*jit_compile=False"
    ):
        trainer.fit(model, words, tags, verbose=0)


@pytest.mark.filterwarnings("error")
def test_circle_loss_compares_all_examples_of_a_batch(trainer):
    """Each example's value, and its gradient, depend on the examples of the other replica."""
    labels = (np.arange(8) % 3).astype(np.float32)[:, None]

    def build():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.UnitNormalization()])

    with trainer.scope():
        model = build()
        model.compile(keras.optimizers.SGD(RATE), keras.losses.Circle(gamma=4.0))
    plain = build()
    plain.set_weights(model.get_weights())
    found = trainer.fit(model, X[:8], labels, batch_size=8, verbose=0).history["loss"]
    with tf.GradientTape() as tape:
        vectors = plain(X[:8])
        distances = tf.nn.relu(1 - tf.matmul(vectors, vectors, transpose_b=True))
        same = labels == labels.T
        near = -4.0 * (0.4 + distances) * (0.4 - distances)
        far = 4.0 * tf.nn.relu(1.4 - distances) * (0.6 - distances)
        attracts = tf.reduce_logsumexp(tf.where(same & ~np.eye(8, dtype=bool), near, -1e9), 1)
        repels = tf.reduce_logsumexp(tf.where(same, -1e9, far), 1)
        value = tf.reduce_mean(tf.math.softplus(attracts + repels))
    assert found == pytest.approx([float(value)], rel=1e-5)
    for variable, grad in zip(plain.trainable_variables, tape.gradient(value, plain.trainable_variables), strict=True):
        variable.assign_sub(RATE * grad)
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)


def test_circle_loss_of_each_example_is_refused(trainer):
    with trainer.scope():
        model = dense()
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
        model = dense()
        model.compile(keras.optimizers.SGD(RATE), ranked)
    plain = dense()
    plain.set_weights(model.get_weights())
    trainer.fit(model, dataset_of, verbose=0)
    for rows in (slice(0, 8), slice(8, 16), [16, 16]):
        with tf.GradientTape() as tape:
            value = ranked(Y[rows], plain(X[rows]))
        for variable, grad in zip(
            plain.trainable_variables, tape.gradient(value, plain.trainable_variables), strict=True
        ):
            variable.assign_sub(RATE * grad)
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("limit", "compiled", "why"),
    [
        (15, {}, "16 bytes of an example are more than strategy.gather_loss_bytes \\(15\\); raise it"),
        (16, {"jit_compile": True}, "XLA, which jit_compile=True asks for, compiles no collectives"),
    ],
)
def test_where_the_batch_is_not_gathered_the_mean_is_trained_and_said(trainer, monkeypatch, limit, compiled, why):
    monkeypatch.setattr(trainer.strategy, "gather_loss_bytes", limit)
    with trainer.scope():
        model = dense()
        model.compile(keras.optimizers.SGD(0.0), total, **compiled)
    with pytest.warns(UserWarning, match=f"The loss total returns one number .*: {why}") as said:
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


def test_a_number_that_a_layer_adds_is_a_mean_and_said_once(trainer):
    with trainer.scope():
        model = adding(tf.reduce_sum)()
        model.compile(keras.optimizers.SGD(0.0), "mse")
    plain = adding(tf.reduce_sum)()
    plain.set_weights(model.get_weights())
    with pytest.warns(UserWarning, match=r"The layer adds.* adds a scalar loss .*treated as a mean") as said:
        trainer.fit(model, X[:16], Y[:16], batch_size=16, verbose=0)
        trainer.evaluate(model, X[:16], Y[:16], batch_size=16, verbose=0)
    assert len([each for each in said if "adds a scalar loss" in str(each.message)]) == 1


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
        model, loss = dense(), Centre()
        model.compile(keras.optimizers.SGD(0.0), loss)
    trainer.fit(model, X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    assert float(loss.calls.numpy()) == 2
    expected = 0.9 * 0.1 * Y[:8].mean(0) + 0.1 * Y[8:16].mean(0)
    np.testing.assert_allclose(loss.centre.numpy(), expected, rtol=1e-5)


def test_added_losses_stand_beside_a_loss_for_which_replicas_wait(trainer):
    """While a replica waits in its loss for another one, that one calls the layers anew."""

    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x**2, -1))
            return x

    with trainer.scope():
        dense = keras.layers.Dense(2)
        model = keras.Sequential([keras.Input((3,)), dense, Penalty()])
        model.compile(keras.optimizers.SGD(RATE), lambda y, p: tf.reduce_sum((y - p) ** 2))
    kernel, bias = (each.astype(np.float64) for each in model.get_weights())
    trainer.fit(model, X[:4], Y[:4], batch_size=4, verbose=0)
    out = X[:4] @ kernel + bias
    gradient = 2 * (out - Y[:4]) + out  # of the squares' sum, and of the sum of their means over two numbers
    np.testing.assert_allclose(dense.kernel.numpy(), kernel - RATE * X[:4].T @ gradient, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The layer .* adds a scalar loss")
def test_a_layer_that_counts_is_called_once_a_step(trainer):
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


def test_a_train_step_declares_its_sum(trainer):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tfdist.total(total(y, self(x)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"mine": loss}

    with trainer.scope():
        model = Own()
        model.compile(keras.optimizers.SGD(0.01))
        model(X[:1])
    plain = dense()
    plain.set_weights(model.get_weights())
    history = trainer.fit(model, X[:8], Y[:8], batch_size=8, verbose=0).history
    with tf.GradientTape() as tape:
        value = total(Y[:8], plain(X[:8]))
    assert history["mine"] == pytest.approx([float(value)], rel=1e-5)
    for variable, grad in zip(plain.trainable_variables, tape.gradient(value, plain.trainable_variables), strict=True):
        variable.assign_sub(0.01 * grad)
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)


def test_a_train_steps_own_logs_are_means_over_examples(trainer):
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
    for tail in (1, 5):
        x, y = X[: BATCH + tail], Y[: BATCH + tail]
        history = trainer.fit(model, x, y, batch_size=BATCH, shuffle=False, verbose=0).history
        assert history["mine"] == pytest.approx([np.mean((model(x[BATCH:]) - y[BATCH:]) ** 2)], rel=1e-6)
