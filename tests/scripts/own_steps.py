"""Steps and loops of your own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.scripts import script
from tests.scripts.images import LABELS, run, sgd

rng = np.random.default_rng(3)
X = rng.standard_normal((22, 6)).astype(np.float32)
Y = rng.standard_normal((22, 2)).astype(np.float32)


@script("Own train_step by compute_loss, compiled metrics")
def own_train_step(scope):
    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                predictions = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=predictions)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
            for metric in self.metrics:
                metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, predictions)
            return {metric.name: metric.result() for metric in self.metrics}

    with scope():
        inputs = keras.Input((6,))
        model = Own(inputs, layers.Dense(2)(layers.Dense(5, "tanh")(inputs)))
        model.compile(sgd(), "mse", metrics=["mae"])
    return run(model, X, Y), model.evaluate(X, Y, verbose=0)


@script("Own train_step with a loss function and metrics of its own, eager off")
def own_loss_in_step(scope):
    with scope():
        loss_of, tracker = keras.losses.MeanSquaredError(), keras.metrics.Mean(name="total")
        error = keras.metrics.MeanAbsoluteError(name="mae")

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                predictions = self(x, training=True)
                loss = loss_of(y, predictions)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            tracker.update_state(loss)
            error.update_state(y, predictions)
            return {"loss": tracker.result(), "mae": error.result(), "root": keras.ops.sqrt(tracker.result())}

        @property
        def metrics(self):
            return [tracker, error]

    with scope():
        inputs = keras.Input((6,))
        model = Own(inputs, layers.Dense(2)(inputs))
        model.compile(optimizer=sgd())
    return run(model, X, Y, batch_size=5), model.get_weights()


@script("Distillation: a frozen teacher, compute_loss of your own")
def distillation(scope):
    class Distiller(keras.Model):
        def __init__(self, student, teacher):
            super().__init__()
            self.student, self.teacher = student, teacher

        def compile(self, optimizer, metrics, hard, soft):
            super().compile(optimizer=optimizer, metrics=metrics)
            self.hard, self.soft = hard, soft

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
            taught = keras.ops.softmax(self.teacher(x, training=False) / 3)
            return 0.1 * self.hard(y, y_pred) + 0.9 * self.soft(taught, keras.ops.softmax(y_pred / 3)) * 9

        def call(self, x):
            return self.student(x)

    with scope():
        teacher = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(4)])
        student = keras.Sequential([keras.Input((6,)), layers.Dense(4)])
        hard = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        teacher.compile(sgd(), hard)
    first = run(teacher, X, LABELS)
    with scope():
        model = Distiller(student, teacher)
        model.compile(sgd(), ["sparse_categorical_accuracy"], hard, keras.losses.KLDivergence())
    second = run(model, X, LABELS)
    return first, second, model.evaluate(X, LABELS, verbose=0), student.get_weights()


@script("Adversarial regularisation: gradients of the input within train_step")
def adversarial_input(scope):
    class Robust(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = self.compute_loss(y=y, y_pred=self(x))
            x = x + 0.1 * tf.sign(tape.gradient(loss, x))
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    with scope():
        model = Robust([keras.Input((6,)), layers.Dense(2)])
        model.compile(sgd(), "mse")
    run(model, X[:18], Y[:18])
    return model.get_weights()


@script(
    "Loop over train_on_batch and test_on_batch", differs="not compared: `tfdist verify` records no `train_on_batch`"
)
def by_batches(scope):
    with scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        model.compile(sgd(), "mse")
    found = [model.train_on_batch(X[start : start + 6], Y[start : start + 6]) for start in range(0, 18, 6)]
    return found, model.test_on_batch(X, Y), model.predict_on_batch(X)


@script("Actor-critic: eager loop with GradientTape and an optimizer outside of a model's compile")
def reinforcement(scope):
    with scope():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, [layers.Dense(2, "softmax")(inputs), layers.Dense(1)(inputs)])
        optimizer = sgd()
        optimizer.build(model.trainable_variables)
        for number in range(3):
            state = tf.constant(X[number : number + 1])
            with tf.GradientTape() as tape:
                chances, value = model(state)
                loss = tf.reduce_sum(-tf.math.log(chances[:, 0]) * Y[number, 0] + (value[:, 0] - Y[number, 1]) ** 2)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    return model.get_weights()
