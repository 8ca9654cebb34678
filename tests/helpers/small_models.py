"""Small models and data for programs that run under several loops."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

_rng = np.random.default_rng(0)
X, Y = (_rng.standard_normal(shape).astype("float32") for shape in ((20, 3), (20, 1)))
WEIGHTS = np.linspace(0.5, 2, 20, dtype="float32")
CLASSES = (Y > 0).astype("int32")


def dense():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def unbuilt():
    return keras.Sequential([keras.layers.Dense(1)])


def dropout():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])


def normalized():
    return keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])


def classifier():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="softmax")])


def sums():
    """A model whose only loss is its layer's, so that it needs no targets."""
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activity_regularizer="l2")])


def named_outputs():
    inputs = keras.Input((3,))
    return keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in ("one", "two")})


def listed_outputs():
    inputs = keras.Input((3,))
    return keras.Model(inputs, [keras.layers.Dense(units)(inputs) for units in (1, 2)])


def listed_inputs():
    first, second = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    return keras.Model([first, second], keras.layers.Dense(1)(first + 2 * second))


def named_inputs():
    first, second = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    return keras.Model({"a": first, "b": second}, keras.layers.Dense(1)(first + 2 * second))


def identity():
    return keras.Sequential([keras.layers.Identity()])


def masked():
    return keras.Sequential(
        [keras.Input((4, 3)), keras.layers.Masking(), keras.layers.SimpleRNN(2, return_sequences=True)]
    )


@keras.saving.register_keras_serializable("keras_loops")
class OwnSteps(keras.Model):
    """A model whose steps change the logs and outputs."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.own = keras.metrics.Mean(name="own")

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        logs = super().train_step(data)
        self.own.update_state(data[0])
        return {"fixed": 3.0, **logs, "own": self.own.result()}

    def test_step(self, data):
        return {**super().test_step(data), "fixed": 5.0}

    def predict_step(self, data):
        return super().predict_step(data) * 2


class Number(OwnSteps):
    """A model whose prediction has a number for each batch."""

    def predict_step(self, data):
        return {"rows": self(data), "mean": tf.reduce_mean(data)}


class OwnFunction(keras.Model):
    """A model whose training function counts its calls, and calls Keras' function."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.calls = 0

    def call(self, x):
        return self.layer(x)

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            super().make_train_function(force)
            own = self.train_function

            def counted(iterator):
                self.calls += 1
                return own(iterator)

            self.train_function = counted
        return self.train_function


class OwnMethods(OwnSteps):
    """A model whose methods change their arguments."""

    def fit(self, x, y, epochs=1, **kwargs):
        return super().fit(x, y, epochs=epochs + 1, batch_size=8, **kwargs)

    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **{**kwargs, "return_dict": True})

    def predict(self, x, **kwargs):
        return super().predict(x, **kwargs)[:3]


class Batches(keras.utils.PyDataset):
    """Batches of 4 rows; the number of ends of epochs shifts them, unless batches are endless, which Keras reads ahead.

    Args:
        number: The number of batches, None for endless.
        **how: As of `PyDataset`.
    """

    def __init__(self, number=5, **how):
        super().__init__(**how)
        self._number, self._epochs = number, 0

    @property
    def num_batches(self):
        return self._number

    def __getitem__(self, index):
        rows = np.arange(index * 4, index * 4 + 4) + self._epochs
        return X[rows % 20], Y[rows % 20]

    def on_epoch_end(self):
        self._epochs += self._number is not None


def dataset(size=4, **options):
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    if "shuffle" in options:
        data = data.shuffle(20, **options["shuffle"])
    data = data.batch(size)
    if "filter" in options:
        data = data.filter(lambda *_: True)
    return data.repeat() if "repeat" in options else data


def generator(number=5):
    for index in range(number):
        yield X[index % 5 * 4 :][:4], Y[index % 5 * 4 :][:4]
