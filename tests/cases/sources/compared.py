"""Losses and metrics with a value for each example that depends on the other examples of the batch."""

import keras
import numpy as np
from keras import ops

import tfdist
from tests.cases.arms import MIRRORED, TWO_EACH, WORKERS
from tests.cases.case import case
from tests.helpers.options import options_set

EVERYWHERE = (MIRRORED, WORKERS, TWO_EACH)
X = np.random.default_rng(0).standard_normal((22, 6)).astype("float32")
Y = X[:, :1]
WEIGHTS = np.linspace(0.5, 2, 22).astype("float32")
BATCH, RATE = 8, 0.1  # the last batch has 6 examples


def in_batch_softmax(y_true, y_pred):
    """Each query's own key is its class among the keys of the batch."""
    queries, keys = ops.split(y_pred, 2, axis=1)
    scores = queries @ ops.transpose(keys)
    return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(scores)[0]), scores, from_logits=True)


def against_gathered_keys(y_true, y_pred):
    queries, keys = ops.split(y_pred, 2, axis=1)
    scores = queries @ ops.transpose(tfdist.whole_batch(keys))
    return ops.logsumexp(scores, axis=1) - ops.sum(queries * keys, axis=1)


def right(weights):
    """Returns the weights after an epoch of gradient descent, and the mean of the loss over it."""
    w, total = np.eye(6), 0.0
    for begin in range(0, len(X), BATCH):
        x, weight = X[begin : begin + BATCH].astype("float64"), weights[begin : begin + BATCH].astype("float64")
        queries, keys = np.split(x @ w, 2, axis=1)
        scores = np.exp(queries @ keys.T)
        chances = scores / scores.sum(1, keepdims=True)
        total += np.sum(-np.log(np.diag(chances)) * weight)
        slope = (chances - np.eye(len(x))) * weight[:, None] / len(x)
        w = w - RATE * x.T @ np.concatenate([slope @ keys, slope.T @ queries], axis=1)
    return w, total / len(X)


def compiled(world, loss, **options):
    with world.scope():
        layer = keras.layers.Dense(6, use_bias=False, kernel_initializer="identity")
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile(keras.optimizers.SGD(RATE), loss, **options)
    return model


def check_fit(world, loss, weights=None, **options):
    model = compiled(world, loss, **options)
    history = model.fit(X, Y, sample_weight=weights, batch_size=BATCH, shuffle=False, verbose=0).history
    w, value = right(np.ones(len(X)) if weights is None else weights)
    return {"loss": (history["loss"], [value]), "weights": (model.get_weights()[0], w)}


@case(*EVERYWHERE, full=())
def a_softmax_over_the_batch(world):
    return check_fit(world, in_batch_softmax)


@case(*EVERYWHERE)
def a_softmax_over_the_batch_with_sample_weights(world):
    return check_fit(world, in_batch_softmax, WEIGHTS)


@case(*EVERYWHERE)
def a_softmax_over_gathered_keys(world):
    return check_fit(world, against_gathered_keys)


@case(*EVERYWHERE, full=True)
def a_softmax_over_the_batch_in_executions(world):
    return check_fit(world, in_batch_softmax, steps_per_execution=2)


@case(*EVERYWHERE, full=())
def a_metric_that_compares_examples(world):
    model = compiled(world, "mse", metrics=[in_batch_softmax])
    found = model.evaluate(X, Y, batch_size=BATCH, verbose=0)[1]
    means = []
    for begin in range(0, len(X), BATCH):
        queries, keys = np.split(X[begin : begin + BATCH].astype("float64"), 2, axis=1)
        scores = queries @ keys.T
        means += list(np.log(np.exp(scores).sum(1)) - np.diag(scores))
    return {"metric": (found, np.mean(means))}


@case(MIRRORED, error=r"in_batch_softmax compares the examples of a batch.*jit_compile=False")
def a_softmax_over_the_batch_that_xla_compiles(world):
    check_fit(world, in_batch_softmax, jit_compile=True)


@case(
    *EVERYWHERE,
    error=r"in_batch_softmax compares the examples of a batch.*gather_loss_bytes.*tfdist\.whole_batch\(tensor\)",
)
def a_softmax_over_a_batch_that_is_too_large_to_gather(world):
    with options_set(world.trainer.strategy, gather_loss_bytes=8):
        check_fit(world, in_batch_softmax)
