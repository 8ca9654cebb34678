"""Losses of a batch that two replicas share, whatever they are divided by: they train, and log, what arithmetic over the whole batch does."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

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
LABELS = (np.arange(SIZE) % 3).astype(np.float32)[:, None]
WEIGHTS = rng.uniform(0, 2, SIZE).astype(np.float32)
WEIGHTS[4:8] = 0  # all of one replica
STEPS = rng.uniform(0, 2, (SIZE, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


def cross_entropy(tags, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tags, logits)


def squares(y, p):
    return tf.reduce_mean((y - p) ** 2, -1)


def seen(words):
    return tf.cast(words != 0, tf.float32)


def ratio(a, b):
    return tf.math.divide_no_nan(tf.reduce_sum(a), tf.reduce_sum(b))


def mean(y, p):
    return tf.reduce_mean((y - p) ** 2)


def total(y, p):
    return tf.reduce_sum((y - p) ** 2)


def norm(y, p):
    return tf.norm(y - p)


def variance(y, p):
    return tf.math.reduce_variance(y - p)


def sum_of_squares(y, p):
    return tf.reduce_sum(squares(y, p))


def overlap(y, p):
    """Dice, of all numbers of a batch together."""
    return 1 - 2 * tf.reduce_sum(y * p) / (tf.reduce_sum(y) + tf.reduce_sum(p))


def ranked(y, p):
    """A loss over pairs of neighbours, which depends on the order of the batch."""
    return tf.reduce_sum(tf.nn.relu(0.5 - (y[1:] - y[:-1]) * (p[1:] - p[:-1])))


def hinges(y, p):
    """Zero for most examples."""
    return tf.reduce_sum(tf.nn.relu(tf.norm(y - p, axis=-1) - 1.5))


def circle(labels, vectors):
    """Each example's value, and its gradient, depend on the examples of the other replica."""
    distances = tf.nn.relu(1 - tf.matmul(vectors, vectors, transpose_b=True))
    same = labels == tf.transpose(labels)
    near = -4.0 * (0.4 + distances) * (0.4 - distances)
    far = 4.0 * tf.nn.relu(1.4 - distances) * (0.6 - distances)
    others = ~tf.eye(len(labels), dtype=tf.bool)
    attracts = tf.reduce_logsumexp(tf.where(same & others, near, -1e9), 1)
    repels = tf.reduce_logsumexp(tf.where(same, -1e9, far), 1)
    return tf.reduce_mean(tf.math.softplus(attracts + repels))


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


class Adds(keras.layers.Layer):
    """Adds a loss of its own."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def call(self, x):
        self.add_loss(self.what(x))
        return x


def dense():
    return [keras.layers.Dense(2)]


def tagger(mask_zero=True):
    return [keras.layers.Embedding(7, 3, mask_zero=mask_zero), keras.layers.Dense(4)]


def unmasked():
    return tagger(mask_zero=False)


def probabilities():
    return [keras.layers.Dense(2, "sigmoid")]


def directions():
    return [keras.layers.Dense(2), keras.layers.UnitNormalization()]


def adding(what, **options):
    return lambda: [keras.layers.Dense(2, **options), Adds(what)]


def added_total(p):
    return tfdist.total(tf.reduce_sum(p))


def masked(tags, logits, words, weights=1.0):
    return ratio(cross_entropy(tags, logits) * seen(words) * weights, seen(words))


def masked_by_weight(tags, logits, words, weights):
    return ratio(cross_entropy(tags, logits) * seen(words) * weights, seen(words) * weights)


def by_weight(y, p, weights):
    return ratio(squares(y, p) * weights, weights)


def mean_of_weights(y, p, weights):
    return mean(y, p) * tf.reduce_mean(weights)


@dataclasses.dataclass(frozen=True)
class Head:
    """Layers of a model that train alone with a loss of their own, beside others.

    Args:
        value: The loss of a whole batch by arithmetic, of the targets, the outputs, the words if `masks`, and the weights if any.
        factor: The loss weight.
    """

    layers: Callable[[], list[keras.layers.Layer]]
    loss: Any
    value: Callable[..., tf.Tensor]
    x: np.ndarray = dataclasses.field(default_factory=lambda: X)
    y: np.ndarray = dataclasses.field(default_factory=lambda: Y)
    weights: np.ndarray | None = None
    masks: bool = False
    factor: float = 1.0

    def value_of(self, batch, outputs):
        """Returns the loss of the examples `batch`, a slice, by arithmetic."""
        arguments = [self.x[batch]] if self.masks else []
        arguments += [] if self.weights is None else [self.weights[batch]]
        return self.value(self.y[batch], outputs, *arguments)


def tag_loss(reduction="sum_over_batch_size", **options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction, **options)


def square_loss(reduction):
    return keras.losses.MeanSquaredError(reduction=reduction)


WORDS_AND_TAGS = {"x": WORDS, "y": TAGS}
VALUES = {
    "masks": Head(tagger, tag_loss(), masked, **WORDS_AND_TAGS, masks=True, factor=2.0),
    "labels_to_ignore": Head(unmasked, tag_loss(ignore_class=0), labelled, **WORDS_AND_TAGS),
    "mask_on_values": Head(unmasked, MasksItsValues(), labelled, **WORDS_AND_TAGS),
    "sum": Head(dense, square_loss("sum"), sum_of_squares, factor=0.5),
    "vector_of_a_function": Head(dense, lambda y, p: squares(y, p), mean),
}
# While a replica waits in a loss of these for another one, that one calls all layers anew: a model of many takes long.
NUMBERS = {
    "declared_sum": Head(dense, lambda y, p: tfdist.total(total(y, p)), total, factor=0.1),  # or rounding grows
    "neighbours": Head(dense, ranked, ranked),
    "circle": Head(directions, keras.losses.Circle(gamma=4.0), circle, y=LABELS),
    "number_of_masked_predictions": Head(tagger, labelled, labelled, **WORDS_AND_TAGS),
    "added_sum": Head(adding(added_total), "mse", mean),
    "added_mean": Head(adding(tf.reduce_mean), "mse", mean),
    "added_vector": Head(adding(lambda p: p[:, 0] ** 2), "mse", mean),
    "regularizer": Head(adding(added_total, kernel_regularizer=keras.regularizers.L2(0.01)), "mse", mean),
}
FUNCTION_NUMBERS = {
    "sum_of_a_function": Head(dense, total, total),
    "mean_of_a_function": Head(dense, mean, mean),
    "declared_sum_and_mean": Head(
        dense, lambda y, p: tfdist.total(total(y, p)) + mean(y, p), lambda y, p: total(y, p) + mean(y, p)
    ),
    "norm": Head(dense, norm, norm),
    "variance": Head(dense, variance, variance),
}
BATCH_NUMBERS = {
    "hinges": Head(dense, hinges, hinges, y=3 * Y),
    "dice": Head(probabilities, keras.losses.Dice(), overlap, y=np.abs(Y)),
    "tversky": Head(probabilities, keras.losses.Tversky(0.5, 0.5, reduction="sum"), overlap, y=np.abs(Y)),
    "mean_over_labels": Head(unmasked, labelled, labelled, **WORDS_AND_TAGS),
}
WEIGHTED = {
    "masks_and_weights": Head(tagger, tag_loss(), masked, **WORDS_AND_TAGS, weights=STEPS, masks=True),
    "masks_and_means_over_weights": Head(
        tagger,
        tag_loss("mean_with_sample_weight"),
        masked_by_weight,
        **WORDS_AND_TAGS,
        weights=STEPS,
        masks=True,
    ),
    "means_over_weights": Head(dense, square_loss("mean_with_sample_weight"), by_weight, weights=WEIGHTS),
    "number_with_weights": Head(dense, mean, mean_of_weights, weights=WEIGHTS),
}
GROUPS = {
    "values": VALUES,
    "numbers": NUMBERS,
    "function_numbers": FUNCTION_NUMBERS,
    "batch_numbers": BATCH_NUMBERS,
    "weighted": WEIGHTED,
}


def build(heads):
    """Returns a model of all heads, each of which has its own input, output and weights."""
    inputs, outputs = {}, {}
    for name, head in heads.items():
        found = inputs[name] = keras.Input(head.x.shape[1:], name=name)
        for layer in head.layers():
            found = layer(found)
        outputs[name] = found
    return keras.Model(inputs, outputs)


def columns(heads, attribute, batch=slice(None)):
    return {name: getattr(head, attribute)[batch] for name, head in heads.items()}


class Loop:
    """Trains heads by plain arithmetic."""

    def __init__(self, model, heads, accumulated):
        self.model, self.heads, self.accumulated = model, heads, accumulated
        self.pending = []

    def values(self, batch):
        """Returns the loss of each head, and the whole loss, to which layers add."""
        outputs = self.model(columns(self.heads, "x", batch))
        values = {name: head.value_of(batch, outputs[name]) for name, head in self.heads.items()}
        weighted = [self.heads[name].factor * value for name, value in values.items()]
        added = [tf.reduce_sum(loss) for loss in self.model.losses]
        return {f"{name}_loss": value for name, value in values.items()} | {"loss": tf.add_n(weighted + added)}

    def train(self, loss, tape):
        variables = self.model.trainable_variables
        self.pending.append([tf.convert_to_tensor(grad) for grad in tape.gradient(loss, variables)])
        if len(self.pending) < self.accumulated:
            return
        for variable, *grads in zip(variables, *self.pending, strict=True):
            variable.assign_sub(RATE * tf.add_n(grads) / self.accumulated)
        self.pending = []

    def epoch(self, trains):
        """Returns the logs of an epoch: means over examples."""
        sums = collections.Counter()
        for begin in range(0, SIZE, BATCH):
            batch = slice(begin, min(begin + BATCH, SIZE))
            with tf.GradientTape() as tape:
                values = self.values(batch)
            sums.update({name: (batch.stop - begin) * float(value) for name, value in values.items()})
            if trains:
                self.train(values["loss"], tape)
        return {name: value / SIZE for name, value in sums.items()}


def compare(trainer, heads, accumulated=1, **compiled):
    """Trains all heads at once, and compares their weights and logs with those of the loop."""
    keras.utils.set_random_seed(1)
    with trainer.scope():
        model = build(heads)
        optimizer = keras.optimizers.SGD(RATE, gradient_accumulation_steps=accumulated if accumulated > 1 else None)
        losses = {name: head.loss for name, head in heads.items()}
        factors = {name: head.factor for name, head in heads.items()}
        model.compile(optimizer, losses, loss_weights=factors, **compiled)
    loop = Loop(build(heads), heads, accumulated)
    loop.model.set_weights(model.get_weights())
    data = [columns(heads, "x"), columns(heads, "y")]
    if all(head.weights is not None for head in heads.values()):
        data.append(columns(heads, "weights"))
    fit = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0, "validation_batch_size": BATCH}
    history = trainer.fit(model, *data[:2], sample_weight=data[2] if data[2:] else None, validation_data=data, **fit)
    for epoch in range(EPOCHS):
        trained, validated = loop.epoch(trains=True), loop.epoch(trains=False)
        expected = trained | {f"val_{name}": value for name, value in validated.items()}
        for name, value in expected.items():
            assert history.history[name][epoch] == pytest.approx(value, rel=1e-4, abs=1e-6), (epoch, name)
    for weight, found, right in zip(model.weights, model.get_weights(), loop.model.get_weights(), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5, err_msg=weight.path)


WAYS = {"steps": {}, "executions": {"steps_per_execution": 2}, "accumulated": {"accumulated": 2}}


@pytest.mark.filterwarnings("ignore:The layer .* adds a scalar loss")
@pytest.mark.parametrize(
    ("group", "way"),
    tiers.cases(
        itertools.product(GROUPS, WAYS),
        quick=[("values", "accumulated"), ("numbers", "steps"), ("weighted", "executions")],
    ),
)
def test_replicas_divide_together(trainer, group, way):
    compare(trainer, GROUPS[group], **WAYS[way])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The layer .* adds a scalar loss")
@pytest.mark.parametrize("group", GROUPS)
def test_one_device_divides_as_well(group):
    compare(tfdist.Trainer("one_device"), GROUPS[group])


def test_replicas_divide_together_eagerly(trainer):
    every = VALUES | BATCH_NUMBERS
    compare(trainer, {name: every[name] for name in ("labels_to_ignore", "dice")}, run_eagerly=True)


@pytest.mark.full
def test_sums_are_compiled(trainer):
    # Two heads, as Keras logs the loss of an output only beside others.
    compare(trainer, {"sum": VALUES["sum"], "second": VALUES["sum"]}, jit_compile=True)


def test_a_mask_cannot_be_compiled(trainer):
    with trainer.scope():
        model = keras.Sequential([keras.Input((5,)), *tagger()])
        model.compile("sgd", tag_loss(), jit_compile=True)
    with pytest.raises(
        ConfigError, match=r"a mean over the values that a mask or weights select\. .*jit_compile=False"
    ):
        trainer.fit(model, WORDS, TAGS, verbose=0)
