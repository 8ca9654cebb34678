"""Trains where last batches leave replicas without examples, beside a plain loop. Arguments: strategy, output folder, cases.

The loop knows nothing of strategies: it takes each batch's even parts in turn, with the moving statistics of their replica,
and applies the mean of their gradients, each part weighing as it has examples.
"""

import json
import os
import sys

from tests.multiprocess import harness

name, out, *chosen = sys.argv[1:]

import tfdist  # noqa: E402

trainer = tfdist.Trainer(name, **({"devices": 4} if name == "mirrored" else {}))
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if "TF_CONFIG" in os.environ else 0

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

REPLICAS = trainer.num_replicas
BATCH = 2 * REPLICAS
RATE = 0.05
rng = np.random.default_rng(0)
IMAGES = rng.standard_normal((2 * BATCH + REPLICAS + 1, 6, 6, 2)).astype(np.float32)
TARGETS = rng.standard_normal((len(IMAGES), 2)).astype(np.float32)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Running(keras.layers.Layer):
    """Statistics of your own: a mean of the inputs, and how often there were some."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, range(len(x.shape) - 1)))
            self.seen.assign_add(1.0)
        return x - self.mean


def sequential(*layers):
    return keras.Sequential([keras.Input(IMAGES.shape[1:]), *layers, keras.layers.Flatten(), keras.layers.Dense(2)])


def even_parts(x, y, replicas):
    return [part for part in zip(np.array_split(x, replicas), np.array_split(y, replicas), strict=True) if len(part[0])]


def errors(model, x, y, training):
    predicted = model(x, training=training)
    return tf.reduce_mean((predicted - y) ** 2, -1), tf.reduce_mean(tf.abs(predicted - y), -1)


def loop(model, batches, epochs, replicas):
    """Trains by plain arithmetic; returns what History should hold."""
    statistics = [[v.numpy() for v in model.non_trainable_variables]] * replicas
    history = {"loss": [], "mae": []}

    def set_statistics(values):
        for variable, value in zip(model.non_trainable_variables, values, strict=True):
            variable.assign(value)

    for _ in range(epochs):
        statistics = [[np.mean(values, 0) for values in zip(*statistics, strict=True)]] * replicas
        seen = []
        for x, y in batches:
            updates, after = [], []
            parts = even_parts(x, y, replicas)
            if len(parts) < replicas:  # all begin with the mean
                statistics = [[np.mean(values, 0) for values in zip(*statistics, strict=True)]] * replicas
            for (xs, ys), before in zip(parts, statistics, strict=False):
                set_statistics(before)
                with tf.GradientTape() as tape:
                    squared, absolute = errors(model, xs, ys, training=True)
                    loss = tf.reduce_mean(squared)
                updates.append([g * (len(xs) / len(x)) for g in tape.gradient(loss, model.trainable_variables)])
                after.append([v.numpy() for v in model.non_trainable_variables])
                seen.append(np.stack([squared, absolute], 1))
            for variable, *gradients in zip(model.trainable_variables, *updates, strict=True):
                variable.assign_sub(RATE * sum(gradients))
            # What has no examples ends where the others do in the mean.
            means = [np.mean(values, 0) for values in zip(*after, strict=True)]
            statistics = after + [means] * (replicas - len(after))
        for key, value in zip(("loss", "mae"), np.concatenate(seen).mean(0), strict=True):
            history[key].append(value)
    set_statistics([np.mean(values, 0) for values in zip(*statistics, strict=True)])
    return history


def cut(x, y, tail):
    """Two whole batches and a short one."""
    end = 2 * BATCH + tail
    return [(x[i : min(i + BATCH, end)], y[i : min(i + BATCH, end)]) for i in range(0, end, BATCH)]


def compare(build, tail, as_data=None, replicas=REPLICAS, reference=None, **compiled):
    """Returns the largest differences between the Trainer and the loop: of History, weights, evaluation, predictions."""
    with trainer.scope():
        keras.utils.set_random_seed(1)
        model = build()
        model.compile(keras.optimizers.SGD(RATE), "mse", metrics=["mae"], **compiled)
    plain = (reference or build)()
    plain.set_weights(model.get_weights())
    batches = cut(IMAGES, TARGETS, tail)
    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    given = as_data(batches) if as_data else (x, y)
    sized = {} if as_data else {"batch_size": BATCH, "shuffle": False}
    history = trainer.fit(model, *given, epochs=2, verbose=0, **sized).history
    expected = loop(plain, batches, 2, replicas)
    squared, absolute = (np.mean(each) for each in errors(plain, x, y, training=False))
    evaluation = trainer.evaluate(model, x, y, batch_size=BATCH, verbose=0)
    predicted = trainer.predict(model, x[-tail:], verbose=0)
    alone = trainer.predict(model, x[:1], verbose=0)
    own = model.predict(x[-tail:], batch_size=BATCH, verbose=0)
    pairs = {
        "loss": (history["loss"], expected["loss"]),
        "mae": (history["mae"], expected["mae"]),
        "weights": (np.concatenate([w.ravel() for w in model.get_weights()]), flat(plain)),
        "evaluation": (evaluation, [squared, absolute]),
        "predictions": (predicted, plain(x[-tail:], training=False)),
        "prediction of one": (alone, plain(x[:1], training=False)),
        "own predictions": (own, predicted),
        "predict_on_batch": (model.predict_on_batch(x[:3]), plain(x[:3], training=False)),
    }
    return {
        key: float(np.abs(np.asarray(mine) - np.asarray(theirs)).max())
        if np.shape(mine) == np.shape(theirs)
        else np.inf
        for key, (mine, theirs) in pairs.items()
    }


def flat(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


def convolutions():
    layers = keras.layers
    return sequential(layers.Conv2D(3, 3, activation="relu"), layers.DepthwiseConv2D(2), layers.MaxPooling2D())


@case
def convolution():
    return [compare(convolutions, tail) for tail in sorted({1, REPLICAS - 1})]


@case
def compiled_convolution():
    return [compare(convolutions, 1, jit_compile=True)]


@case
def eager_convolution():
    return [compare(convolutions, 1, run_eagerly=True)]


@case
def recurrence():
    layers = keras.layers
    model = lambda: sequential(layers.Reshape((6, 12)), layers.LSTM(3, return_sequences=True), layers.GRU(2))  # noqa: E731
    return [compare(model, 1)]


@case
def executions_of_two():
    return [compare(convolutions, 1, steps_per_execution=2)]


def running():
    return sequential(keras.layers.BatchNormalization(), Running())


@case
def statistics():
    return [compare(running, 1)]


@case
def statistics_of_unequal_shares():
    return [compare(running, REPLICAS + 1)]


@case
def averaged_statistics():
    """After each step the mean over all replicas is the mean over those with examples, of what each would make of the mean before."""

    def difference(tail):
        inputs = keras.Input(IMAGES.shape[1:])
        norm = keras.layers.BatchNormalization(momentum=0.8)
        with trainer.scope():
            model = keras.Model(inputs, keras.layers.GlobalMaxPooling2D()(norm(inputs)))
            model.compile(keras.optimizers.SGD(0.0), "mse")
        batches = cut(IMAGES, TARGETS, tail)
        x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        trainer.fit(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        mean, variance = np.zeros(2), np.ones(2)
        for images, targets in batches * 2:
            parts = [part for part, _ in even_parts(images, targets, REPLICAS)]
            mean = np.mean([0.8 * mean + 0.2 * part.mean((0, 1, 2)) for part in parts], 0)
            variance = np.mean([0.8 * variance + 0.2 * part.var((0, 1, 2)) for part in parts], 0)
        found = norm.moving_mean.numpy(), norm.moving_variance.numpy()
        return {"statistics": float(np.abs(np.subtract(found, (mean, variance))).max())}

    return [difference(tail) for tail in sorted({1, REPLICAS - 1, REPLICAS + 1})]


@case
def synchronized_statistics():
    """As of one replica that has the whole batch."""

    def build(synchronized=True):
        return sequential(keras.layers.Conv2D(3, 3), keras.layers.BatchNormalization(synchronized=synchronized))

    return [compare(build, 1, replicas=1, reference=lambda: build(False))]


def function_of(known):
    def as_data(batches):
        """Each replica's parts, in turn; the second worker's end earlier."""

        def mine(context):
            workers, number = context.num_input_pipelines, context.input_pipeline_id
            parts = [even_parts(x, y, REPLICAS) for x, y in batches]
            made = [tf.data.Dataset.from_tensors(part) for step in parts for part in step[number::workers]]
            dataset = made[0]
            for each in made[1:]:
                dataset = dataset.concatenate(each)
            return dataset if known else dataset.filter(lambda *_: True)

        return (mine,)

    return as_data


@case
def functions():
    return [compare(convolutions, 1, function_of(True)), compare(convolutions, 1, function_of(False))]


@case
def functions_in_executions():
    return [compare(convolutions, 1, function_of(known), steps_per_execution=2) for known in (True, False)]


if __name__ == "__main__":
    results = {}
    for each in chosen or CASES:
        results[each] = CASES[each]()
        print(each, results[each], flush=True)
    harness.store(out, RANK, results)
