"""Steps that divide their loss by the size of the global batch, as TensorFlow's guide to custom training says."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.arms import MIRRORED, SERVERS, WORKERS
from tests.cases.case import case

X = np.linspace(-1, 2, 23, dtype="float32")[:, None]
Y = 3 * X[:, 0] + 1
RATE, BATCH = 0.1, 8
average = tf.nn.compute_average_loss  # bound before any step


def trained(world, loss_of, weights=None, **compiled):
    """Returns the weights after two epochs, and the logs of the second one."""

    class Own(keras.Model):
        def __init__(self, *args):
            super().__init__(*args)
            self.mean = keras.metrics.Mean(name="mean")

        def _loss(self, data):
            x, y, *weight = data
            return loss_of(tf.square(y - self(x, training=True)[:, 0]), self, *weight)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self._loss(data)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            self.mean.update_state(loss)
            return {"mean": self.mean.result(), "own": loss}

        def test_step(self, data):
            self.mean.update_state(self._loss(data))
            return {"mean": self.mean.result()}

    with world.scope():
        entry = keras.Input((1,))
        model = Own(entry, keras.layers.Dense(1, kernel_initializer="zeros")(entry))
        model.compile(keras.optimizers.SGD(RATE), **compiled)
    fitted = model.fit(X, Y, BATCH, 2, shuffle=False, verbose=0, sample_weight=weights)
    tested = model.evaluate(X, Y, batch_size=BATCH, verbose=0, sample_weight=weights, return_dict=True)
    return [each.ravel() for each in model.get_weights()], fitted.history["mean"][-1], tested["mean"]


def by_hand(divisor, weights=None, decay=0.0):
    """Returns what `trained` does, from a loop over batches in NumPy."""
    a, b = 0.0, 0.0
    weights = np.ones(23) if weights is None else weights

    def one(i):
        x, y, w = (np.asarray(each[i : i + BATCH], "float64") for each in (X[:, 0], Y, weights))
        size = divisor or len(x)
        error = a * x + b - y
        loss = (w * error**2).sum() / size + decay * a * a
        return loss, (2 * w * error * x).sum() / size + 2 * decay * a, (2 * w * error).sum() / size

    for _ in range(2):
        logs = []
        for i in range(0, 23, BATCH):
            loss, da, db = one(i)
            logs.append(loss)
            a, b = a - RATE * da, b - RATE * db
    return [[a], [b]], np.mean(logs), np.mean([one(i)[0] for i in range(0, 23, BATCH)])


def pairs(found, right):
    weights = np.concatenate(found[0]), np.concatenate(right[0])
    return {"weights": weights, "logs": (found[1], right[1]), "evaluate": (found[2], right[2])}


@case(MIRRORED, WORKERS, SERVERS)
def average_loss_of_a_given_batch_size(world):
    found = trained(world, lambda losses, model: average(losses, global_batch_size=BATCH))
    return pairs(found, by_hand(BATCH)) if world.arm != SERVERS else {"logs": (np.isfinite(found[1]), True)}


@case()
def average_loss_without_a_size(world):
    return pairs(trained(world, lambda losses, model: average(losses)), by_hand(None))


@case(full=True)
def average_loss_with_weights_and_a_tensor(world):
    weights = np.linspace(0, 2, 23).astype("float32")

    def loss(losses, model, weight):
        return tf.nn.compute_average_loss(losses, sample_weight=weight, global_batch_size=tf.constant(BATCH))

    return pairs(trained(world, loss, weights), by_hand(BATCH, weights))


@case()
def regularization_scaled_by_tensorflow(world):
    def loss(losses, model):
        decay = 0.1 * tf.reduce_sum(model.trainable_variables[0] ** 2)
        return average(losses, global_batch_size=BATCH) + tf.nn.scale_regularization_loss(decay)

    return pairs(trained(world, loss), by_hand(BATCH, decay=0.1))


@case(full=True)
def division_declared_a_total(world):
    found = trained(world, lambda losses, model: tfdist.total(tf.reduce_sum(losses) / BATCH))
    return pairs(found, by_hand(BATCH))


@case(full=True)
def division_by_replicas_seen_in_the_step(world):
    def loss(losses, model):
        size = tf.shape(losses)[0] * model.distribute_strategy.num_replicas_in_sync
        return tf.reduce_sum(losses) / tf.cast(size, "float32")

    return pairs(trained(world, loss), by_hand(None))


@case(full=True)
def average_loss_without_graphs(world):
    found = trained(world, lambda losses, model: average(losses, global_batch_size=BATCH), run_eagerly=True)
    return {"weights": pairs(found, by_hand(BATCH))["weights"]}  # logs are the means of the replicas' own


@case(full=True)
def average_loss_of_several_steps_of_one_execution(world):
    found = trained(world, lambda losses, model: average(losses, global_batch_size=BATCH), steps_per_execution=2)
    return pairs(found, by_hand(BATCH))


@case(full=True)
def average_loss_in_a_compiled_loss(world):
    def loss(y_true, y_pred):
        return average(tf.square(tf.reshape(y_true, [-1]) - y_pred[:, 0]), global_batch_size=BATCH)

    with world.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(RATE), loss)
    model.fit(X, Y, BATCH, 2, shuffle=False, verbose=0)
    return {"weights": (np.concatenate([w.ravel() for w in model.get_weights()]), np.concatenate(by_hand(BATCH)[0]))}
