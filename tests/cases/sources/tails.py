"""Last batches that leave replicas without examples train, evaluate and predict what a plain loop does.

The loop knows nothing of strategies: it takes each batch's even parts in turn, with the moving statistics of their replica,
and applies the mean of their gradients, each part weighing as it has examples.
"""

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import FOUR_DEVICES, WORKERS
from tests.cases.case import case

ARMS = (WORKERS, FOUR_DEVICES)
RATE = 0.05
rng = np.random.default_rng(0)
IMAGES = rng.standard_normal((21, 6, 6, 2)).astype(np.float32)  # for four replicas two batches of 8 and 5 more
TARGETS = rng.standard_normal((len(IMAGES), 2)).astype(np.float32)


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


def cut(world, tail):
    """Returns two whole batches of two examples for each replica, and a short one."""
    size = 2 * world.replicas
    end = 2 * size + tail
    return [(IMAGES[i : min(i + size, end)], TARGETS[i : min(i + size, end)]) for i in range(0, end, size)]


def trained(world, build, tail, as_data=None, replicas=None, reference=None, **compiled):
    """Compares the Trainer with the loop: History, weights, evaluation, predictions."""
    trainer, size = world.trainer, 2 * world.replicas
    with world.scope():
        model = build()
        model.compile(keras.optimizers.SGD(RATE), "mse", metrics=["mae"], **compiled)
    plain = (reference or build)()
    plain.set_weights(model.get_weights())
    batches = cut(world, tail)
    x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    given = as_data(world, batches) if as_data else (x, y)
    sized = {} if as_data else {"batch_size": size, "shuffle": False}
    history = trainer.fit(model, *given, epochs=2, verbose=0, **sized).history
    expected = loop(plain, batches, 2, replicas or world.replicas)
    squared, absolute = (np.mean(each) for each in errors(plain, x, y, training=False))
    evaluation = trainer.evaluate(model, x, y, batch_size=size, verbose=0)
    predicted = trainer.predict(model, x[-tail:], verbose=0)
    alone = trainer.predict(model, x[:1], verbose=0)
    own = model.predict(x[-tail:], batch_size=size, verbose=0)
    return {
        "loss": (history["loss"], expected["loss"]),
        "mae": (history["mae"], expected["mae"]),
        "weights": (model.get_weights(), plain.get_weights()),
        "evaluation": (evaluation, [squared, absolute]),
        "predictions": (predicted, plain(x[-tail:], training=False)),
        "prediction of one": (alone, plain(x[:1], training=False)),
        "own predictions": (own, predicted),
        "predict_on_batch": (model.predict_on_batch(x[:3]), plain(x[:3], training=False)),
    }


def convolutions():
    layers = keras.layers
    return sequential(layers.Conv2D(3, 3, activation="relu"), layers.DepthwiseConv2D(2), layers.MaxPooling2D())


def running():
    return sequential(keras.layers.BatchNormalization(), Running())


def each(tails, one):
    """Returns the pairs of all tails."""
    return {f"{key} of {tail}": pair for tail in sorted(tails) for key, pair in one(tail).items()}


UNDECLARED = "Running: .* declared no aggregation"


@case(*ARMS, full=(FOUR_DEVICES,), warning=UNDECLARED)
def statistics(world):
    return trained(world, running, 1)


@case(*ARMS, full=(FOUR_DEVICES,))
def averaged_statistics(world):
    """After each step the mean over all replicas is the mean over those with examples, of what each would make of the mean before."""
    replicas = world.replicas
    inputs = keras.Input(IMAGES.shape[1:])
    norm = keras.layers.BatchNormalization(momentum=0.8)
    with world.scope():
        model = keras.Model(inputs, keras.layers.GlobalMaxPooling2D()(norm(inputs)))
        model.compile(keras.optimizers.SGD(0.0), "mse")

    def moved(tail):
        batches = cut(world, tail)
        x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        norm.moving_mean.assign(np.zeros(2))
        norm.moving_variance.assign(np.ones(2))
        model.fit(x, y, batch_size=2 * replicas, epochs=2, shuffle=False, verbose=0)
        mean, variance = np.zeros(2), np.ones(2)
        for images, targets in batches * 2:
            parts = [part for part, _ in even_parts(images, targets, replicas)]
            mean = np.mean([0.8 * mean + 0.2 * part.mean((0, 1, 2)) for part in parts], 0)
            variance = np.mean([0.8 * variance + 0.2 * part.var((0, 1, 2)) for part in parts], 0)
        return {"mean": (norm.moving_mean.numpy(), mean), "variance": (norm.moving_variance.numpy(), variance)}

    return each({1, replicas - 1, replicas + 1}, moved)


def function_of(known):
    def as_data(world, batches):
        """Each replica's parts, in turn; the second worker's end earlier."""

        def mine(context):
            workers, number = context.num_input_pipelines, context.input_pipeline_id
            parts = [even_parts(x, y, world.replicas) for x, y in batches]
            made = [tf.data.Dataset.from_tensors(part) for step in parts for part in step[number::workers]]
            dataset = made[0]
            for part in made[1:]:
                dataset = dataset.concatenate(part)
            return dataset if known else dataset.filter(lambda *_: True)

        return (mine,)

    return as_data


# They have the model of convolution and the data of statistics. A number that is known goes the way of arrays.


@case(*ARMS, full=(FOUR_DEVICES,))
def functions_of_an_unknown_number(world):
    return trained(world, convolutions, 1, function_of(False))


@case(*ARMS, full=True)
def functions_of_a_known_number(world):
    return trained(world, convolutions, 1, function_of(True))


@case(*ARMS, full=True)
def convolution(world):
    return each({1, world.replicas - 1}, lambda tail: trained(world, convolutions, tail))


@case(*ARMS, full=True, warning=UNDECLARED)
def statistics_of_unequal_shares(world):
    return trained(world, running, world.replicas + 1)


@case(*ARMS, slow=True)
def compiled_convolution(world):
    return trained(world, convolutions, 1, jit_compile=True)


@case(*ARMS, slow=True)
def eager_convolution(world):
    return trained(world, convolutions, 1, run_eagerly=True)


@case(*ARMS, slow=True)
def recurrence(world):
    layers = keras.layers
    model = lambda: sequential(layers.Reshape((6, 12)), layers.LSTM(3, return_sequences=True), layers.GRU(2))  # noqa: E731
    return trained(world, model, 1)


@case(*ARMS, slow=True)
def executions_of_two(world):
    return trained(world, convolutions, 1, steps_per_execution=2)


@case(*ARMS, slow=True)
def synchronized_statistics(world):
    """As of one replica that has the whole batch."""

    def build(synchronized=True):
        return sequential(keras.layers.Conv2D(3, 3), keras.layers.BatchNormalization(synchronized=synchronized))

    return trained(world, build, 1, replicas=1, reference=lambda: build(False))


@case(*ARMS, slow=True)
def functions_in_executions(world):
    return trained(world, convolutions, 1, function_of(True), steps_per_execution=2)


@case(*ARMS, slow=True)
def functions_of_an_unknown_number_in_executions(world):
    return trained(world, convolutions, 1, function_of(False), steps_per_execution=2)
