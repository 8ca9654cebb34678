"""Ways of training: checkpoints, callbacks, files of records, LoRA, searches, scripts written for other tools."""

import json
import os
import pathlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.scripts import script
from tests.scripts.images import run, sgd

rng = np.random.default_rng(5)
X = rng.standard_normal((22, 6)).astype(np.float32)
Y = rng.standard_normal((22, 2)).astype(np.float32)


def dense(optimizer=None, **arguments):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(2)])
    model.compile(**{"optimizer": optimizer or sgd(), "loss": "mse", **arguments})
    return model


@script("Keras' distributed guide: all within the scope, ModelCheckpoint, continue from the newest file", lines=1)
def guide(scope):
    place = pathlib.Path() / "guide"
    place.mkdir(exist_ok=True, parents=True)
    with scope():
        model = dense()
        files = keras.callbacks.ModelCheckpoint(place / "ckpt-{epoch}.keras")
        first = run(model, X, Y, callbacks=[files])
    with scope():
        again = keras.models.load_model(place / "ckpt-2.keras")
        return first, run(again, X, Y), again.evaluate(X, Y, verbose=0)


@script("Schedules and callbacks: cosine decay with warm-up, ReduceLROnPlateau, a callback of your own")
def schedules(scope):
    class Rates(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.rates = []

        def on_epoch_end(self, epoch, logs=None):
            self.rates.append(float(self.model.optimizer.learning_rate))

    rates = Rates()
    with scope():
        decay = keras.optimizers.schedules.CosineDecay(0.01, 6, warmup_target=0.1, warmup_steps=3)
        model = dense(keras.optimizers.SGD(decay))
    first = run(model, X, Y, callbacks=[rates])
    with scope():
        other = dense(keras.optimizers.Adam(0.1, epsilon=1e-2))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", min_delta=10.0, patience=1)
    return first, rates.rates, run(other, X, Y, callbacks=[plateau], epochs=3)


@script("Gradient accumulation, global clipping: options of the optimizer")
def accumulation(scope):
    with scope():
        model = dense(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, global_clipnorm=0.5))
    return run(model, X[:18], Y[:18]), model.get_weights()


@script("Moving averages of the weights: use_ema, SwapEMAWeights, ModelCheckpoint of the averages")
def averages(scope):
    place = pathlib.Path() / "averaged.weights.h5"
    with scope():
        model = dense(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    files = keras.callbacks.ModelCheckpoint(place, save_weights_only=True)
    history = run(model, X, Y, callbacks=[swap, files], validation_data=(X, Y))
    with scope():
        again = dense()
        again.load_weights(place)
    return history, model.get_weights(), again.get_weights()


@script("Mixed precision, steps_per_execution, TensorBoard")
def faster(scope):
    place = pathlib.Path() / "logs"
    with scope():
        policy = keras.mixed_precision.DTypePolicy("mixed_bfloat16")
        layer = layers.Dense(2, dtype=policy)
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile(sgd(), "mse", steps_per_execution=2)
    history = run(model, X[:18], Y[:18], callbacks=[keras.callbacks.TensorBoard(place)])
    return np.round(history["loss"], 1)


@script("TFRecord files of unequal length: interleave, parse, batch, repeat with steps_per_epoch")
def records(scope):
    place = pathlib.Path() / f"records{os.getpid()}"
    place.mkdir(parents=True)
    draw = np.random.default_rng(6)  # not the module's, of which each script would change what the next one draws
    for number, rows in enumerate((3, 9, 6)):
        with tf.io.TFRecordWriter(str(place / f"{number}.tfrecord")) as writer:
            for row in draw.standard_normal((rows, 8)).astype(np.float32):
                writer.write(tf.io.serialize_tensor(row).numpy())

    def parse(record):
        row = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), [8])
        return row[:6], row[6:]

    files = tf.data.Dataset.list_files(str(place / "*"), shuffle=False)
    data = files.interleave(tf.data.TFRecordDataset, cycle_length=2).map(parse)
    with scope():
        model = dense()
    once = model.fit(data.batch(4), epochs=2, verbose=0).history
    return once, model.fit(data.repeat().batch(4), epochs=2, steps_per_epoch=3, verbose=0).history


@script("LoRA: enable_lora on a trained model, fit, quantities that train")
def lora(scope):
    with scope():
        model = dense()
    first = run(model, X, Y)
    with scope():
        for layer in model.layers:
            layer.enable_lora(2)
        model.compile(sgd(), "mse")
    return first, run(model, X, Y), len(model.trainable_weights)


@script("Fine-tuning by fit, save, load and fit again, with JSON and weights")
def saved(scope):
    place = pathlib.Path()
    with scope():
        model = dense()
    first = run(model, X, Y)
    model.save(place / "saved.keras")
    model.save_weights(place / "saved.weights.h5")
    with scope():
        again = keras.models.load_model(place / "saved.keras")
        third = keras.models.model_from_json(json.dumps(json.loads(model.to_json())))
        third.load_weights(place / "saved.weights.h5")
        third.compile(sgd(), "mse")
    return first, run(again, X, Y), third.evaluate(X, Y, verbose=0)


@script("K-fold: several models, one after the other")
def folds(scope):
    found = []
    for fold in range(3):
        left = np.arange(22) % 3 != fold
        with scope():
            model = dense()
        found.append((run(model, X[left], Y[left]), model.evaluate(X[~left], Y[~left], verbose=0)))
    return found


@script("KerasTuner: a search over units, each trial in the scope", lines=3)
def search(scope):
    import keras_tuner

    def build(choices):
        with scope():
            model = keras.Sequential([keras.Input((6,)), layers.Dense(choices.Int("units", 2, 4))])
            model.add(layers.Dense(2))
            model.compile(sgd(), "mse")
        return model

    place = pathlib.Path() / f"search{os.getpid()}"
    tuner = keras_tuner.GridSearch(build, "loss", max_trials=3, directory=place, project_name="p")
    tuner.search(X, Y, epochs=1, batch_size=6, shuffle=False, verbose=0)
    return sorted(trial.hyperparameters.get("units") for trial in tuner.oracle.trials.values())


@script("Generator: fit on a Python generator with steps_per_epoch")
def generator(scope):
    def batches():
        while True:
            for start in range(0, 18, 6):
                yield X[start : start + 6], Y[start : start + 6]

    with scope():
        model = dense()
    return model.fit(batches(), epochs=2, steps_per_epoch=3, verbose=0).history


@script("Written for Horovod: its optimizer, callbacks and rank 0 left out")
def other_tool(scope):
    with scope():
        model = dense(keras.optimizers.SGD(0.05, momentum=0.5, nesterov=True), metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().shuffle(22, seed=1).batch(6)
    return model.fit(data, steps_per_epoch=3, epochs=2, verbose=0).history


@script("Written for keras.distribution: DataParallel is set, and stays")
def keras_distribution(scope):
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        with scope():
            model = dense()
        return run(model, X, Y), model.evaluate(X, Y, verbose=0)
    finally:
        keras.distribution.set_distribution(None)
