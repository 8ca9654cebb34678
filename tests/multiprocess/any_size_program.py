"""Trains models on any number of devices in any number of processes. Arguments: strategy, output folder, devices of this process, and
cases, each as `CASE:COMPRESSION`.

Stores for each: the hash of each weight, optimizer variable and prediction, and the logs of every epoch as JSON.
"""

import hashlib
import json
import os
import sys

os.environ["TF_NUM_INTRAOP_THREADS"] = (
    "1"  # threads of a process share the sums within a replica: equally many everywhere
)

import tfdist
from tests.helpers.options import set_options
from tests.multiprocess import harness

name, out, devices, *chosen = sys.argv[1:]
trainer = tfdist.Trainer(name, devices=int(devices), **(harness.transport() if name == "multi_worker_mirrored" else {}))

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

set_options(trainer.strategy, bucket_bytes=4000)  # several of each model
COMPRESSIONS = {
    "none": None,
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": tfdist.CompressionConfig("powersgd", start_powerSGD_iter=0),
}
BATCH = 33
SIZE = 4 * BATCH + 2  # the last batch has fewer examples than there are replicas
rng = np.random.default_rng(0)
X = rng.standard_normal((SIZE, 8, 8)).astype(np.float32)
Y = rng.integers(0, 10, SIZE).astype(np.int32)
WORDS = np.abs(X[:, 0] * 4).astype(np.int32) % 40  # a batch has each of the first ones many times
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def dense(*layers):
    """Returns a classifier; a compressor leaves smaller kernels than its first one alone."""
    first = [keras.layers.Flatten(), keras.layers.Dense(32, activation="tanh")]
    return keras.Sequential([keras.Input((8, 8)), *first, *layers, keras.layers.Dense(10, dtype="float32")])


def adam(**arguments):
    return lambda: keras.optimizers.Adam(0.01, **arguments)


def digest(value):
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def train(build=dense, data=(X, Y), fit=None, optimizer=None, policy="float32", **compiled):
    """Returns what a training has come to: for each variable its hash, and the logs."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    with trainer.scope():
        model = build()
        how = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}
        model.compile((optimizer or adam())(), **{**how, **compiled})
    keras.config.set_dtype_policy("float32")
    x, y = data if isinstance(data[0], np.ndarray) else (X, Y)
    sized = {"batch_size": BATCH} if len(data) > 1 else {}
    arguments = {"epochs": 3, "verbose": 0, "validation_data": (x[:50], y[:50]), **sized, **(fit or {})}
    history = trainer.fit(model, *data, **arguments).history
    predictions = trainer.predict(model, x[:50], batch_size=25, verbose=0)
    return {
        "weights": {weight.path: digest(weight) for weight in model.weights},
        "optimizer": {variable.path: digest(variable) for variable in model.optimizer.variables},
        "history": json.dumps(history, sort_keys=True),
        "predictions": digest(predictions),
    }


class Noise(keras.layers.Layer):
    """Draws from Keras' generator without a seed."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x), stddev=0.01) if training else x


@case
def cnn():
    def build():
        layers = [
            keras.layers.Conv2D(8, 3),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.3),
            keras.layers.Flatten(),
            keras.layers.Dense(64),  # whose gradient is too long for one gather
            keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)) * 0.01),
            Noise(),
            keras.layers.Dense(10),
        ]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    return train(build, (X[..., None], Y))


@case
def synchronized_normalization():
    def build():
        return dense(keras.layers.BatchNormalization(synchronized=True), keras.layers.Dropout(0.3))

    return train(build)


@case
def gru():
    def build():
        recurrent = keras.layers.GRU(24, dropout=0.2, recurrent_dropout=0.1)
        return keras.Sequential([keras.Input((8, 8)), recurrent, keras.layers.Dense(10)])

    return train(build)


@case
def transformer():
    def build():
        model_input = keras.Input((8, 8))
        x = keras.layers.Dense(32)(model_input)
        attended = keras.layers.MultiHeadAttention(2, 16, dropout=0.1)(x, x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(attended))
        hidden = keras.layers.Dense(32, activation="gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(hidden))
        return keras.Model(model_input, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(x)))

    return train(build)


@case
def embedding():
    def build():
        words = [keras.layers.Embedding(40, 32), keras.layers.Flatten(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((8,), dtype="int32"), *words])

    return train(build, (WORDS, Y))


@case
def batches_without_rest():
    return train(data=(X[: 4 * BATCH], Y[: 4 * BATCH]))


@case
def executions():
    return train(steps_per_execution=3)


@case
def accumulation():
    return train(optimizer=adam(gradient_accumulation_steps=2))


@case
def global_clipnorm():
    return train(optimizer=adam(global_clipnorm=0.05))


@case
def loss_of_one_number():
    def mean_of_squares(y, predictions):
        return tf.reduce_mean((predictions - tf.one_hot(tf.cast(tf.reshape(y, [-1]), tf.int32), 10)) ** 2)

    return train(loss=mean_of_squares)


@case
def function_of_epochs():
    def data(context):
        return tfdist.data.epochs((X, Y), context, global_batch_size=8 * trainer.num_replicas, seed=1)

    return train(data=(data,), fit={"steps_per_epoch": 4})


@case
def data_of_unknown_size():
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SIZE).batch(BATCH)
    return train(data=(batches.filter(lambda *_: True),))


@case
def mixed_bfloat16():
    return train(policy="mixed_bfloat16")


if __name__ == "__main__":
    results = {}
    for each in chosen:
        function, compression = each.split(":")
        trainer.compression = tfdist.compression.create(COMPRESSIONS[compression])
        results[each] = CASES[function]()
        print(each, flush=True)
    harness.store(out, trainer.task.index, results | {"transport": getattr(trainer.strategy, "transport", None)})
