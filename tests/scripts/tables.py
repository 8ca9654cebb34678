"""Tables, time series and recommendations."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.scripts import script
from tests.scripts.images import run, sgd

rng = np.random.default_rng(4)
NUMBERS = rng.standard_normal((22, 3)).astype(np.float32)
CITIES = rng.choice(["Rome", "Oslo", "Lima"], 22)
TARGET = rng.integers(0, 2, 22).astype(np.float32)


@script("Subclassed model: a dictionary of inputs, layers made in __init__, metrics of weights")
def subclassed(scope):
    class Towers(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(4, "tanh")
            self.head = layers.Dense(1)

        def call(self, inputs, training=False):
            return self.head(keras.ops.concatenate([self.first(inputs["a"]), self.second(inputs["b"])], -1))

    with scope():
        model = Towers()
        model.compile(sgd(), "mse", weighted_metrics=["mae"])
    given = {"a": NUMBERS, "b": NUMBERS[:, :2]}
    history = run(model, given, TARGET, sample_weight=np.arange(22) / 11)
    return history, model.predict(given, verbose=0)


@script("Structured data: Normalization, StringLookup and CategoryEncoding, inputs by name")
def structured(scope):
    with scope():
        normalise, lookup = layers.Normalization(), layers.StringLookup(output_mode="one_hot")
        normalise.adapt(NUMBERS)
        lookup.adapt(CITIES)
        numbers, cities = keras.Input((3,), name="numbers"), keras.Input((1,), dtype="string", name="cities")
        outputs = layers.Dense(1, "sigmoid")(layers.Concatenate()([normalise(numbers), lookup(cities)]))
        model = keras.Model({"numbers": numbers, "cities": cities}, outputs)
        model.compile(sgd(), "binary_crossentropy", metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices(({"numbers": NUMBERS, "cities": CITIES[:, None]}, TARGET)).batch(6)
    return model.fit(data, epochs=2, verbose=0).history, model.evaluate(data, verbose=0)


@script("Time series: windows by timeseries_dataset_from_array, EarlyStopping, ModelCheckpoint")
def time_series(scope):
    series = np.sin(np.arange(60, dtype=np.float32))[:, None]
    data = keras.utils.timeseries_dataset_from_array(series[:-5], series[5:], sequence_length=5, batch_size=8)
    with scope():
        model = keras.Sequential([keras.Input((5, 1)), layers.GRU(3), layers.Dense(1)])
        model.compile(sgd(), "mse")
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1)
    return model.fit(data, validation_data=data, epochs=9, callbacks=[stop], verbose=0).history


@script("Recommendation: embeddings of users and items")
def recommendation(scope):
    draw = np.random.default_rng(6)
    users, items = draw.integers(0, 5, 22), draw.integers(0, 7, 22)
    with scope():
        user, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
        both = layers.Dot(1)([layers.Embedding(5, 4)(user), layers.Embedding(7, 4)(item)])
        model = keras.Model([user, item], layers.Activation("sigmoid")(both))
        # No Adam: plain Keras updates an embedding's row once for each time that its id occurs.
        model.compile(sgd(), "binary_crossentropy")
    return run(model, [users, items], TARGET)


@script("Unbalanced classes: class_weight, precision, recall and AUC")
def unbalanced(scope):
    with scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "relu"), layers.Dense(1, "sigmoid")])
        metrics = [keras.metrics.Precision(), keras.metrics.Recall(), keras.metrics.AUC(name="auc"), "accuracy"]
        model.compile(sgd(), "binary_crossentropy", metrics=metrics)
    return run(model, NUMBERS, TARGET, class_weight={0: 1.0, 1: 5.0}, validation_data=(NUMBERS, TARGET))


@script("Several outputs: losses, weights and metrics by name, dictionaries")
def several_outputs(scope):
    with scope():
        inputs = keras.Input((3,), name="x")
        shared = layers.Dense(4, "relu")(inputs)
        outputs = {"price": layers.Dense(1, name="price")(shared), "sold": layers.Dense(1, name="sold")(shared)}
        model = keras.Model(inputs, outputs)
        losses = {"price": "mse", "sold": keras.losses.BinaryCrossentropy(from_logits=True)}
        model.compile(sgd(), losses, loss_weights={"price": 0.5, "sold": 2.0}, metrics={"price": ["mae"]})
    # Whole batches: where the last one is smaller, plain Keras logs a mean of batches for each output.
    return run(model, NUMBERS[:18], {"price": NUMBERS[:18, :1], "sold": TARGET[:18, None]})
