"""Trains recommenders with tables on any number of devices in any number of processes. Arguments: strategy, output folder, devices of this
process, the shards of the smaller table, and cases; `backup:FOLDER` writes a backup, and `restore:FOLDER` reads a copy of it.

Stores for each case: the losses, the hashes of all weights and slots of the saved model, predictions, and the bytes of the large table that
this process holds. A case of `ERRORS` stores the text of an error instead.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import sys

os.environ["TF_NUM_INTRAOP_THREADS"] = "1"

import tfdist
from tests.helpers.options import set_options
from tests.multiprocess import harness
from tfdist.layers.table import with_tables

name, out, devices, shards, *chosen = sys.argv[1:]
options = harness.transport() if name == "multi_worker_mirrored" else {}
if name != "one_device":
    options["devices"] = int(devices)
trainer = tfdist.Trainer(name, **options)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

BATCH = 16
SIZE = 3 * BATCH + 2  # the last batch has fewer examples than there are replicas
USERS = 65_537  # the smallest odd number of rows of a table that workers share
rng = np.random.default_rng(0)
X = [rng.integers(0, 9, SIZE) * 7281, rng.integers(0, 23, (SIZE, 3))]
Y = rng.standard_normal(SIZE).astype("float32")
STEP = 3  # of the backup


def build(dtype=None, **arguments):
    user, items = keras.Input((), dtype="int64"), keras.Input((3,), dtype="int32")
    rows = tfdist.layers.Embedding(USERS, 4, seed=1, name="users", dtype=dtype, **arguments)(user)
    seen = tfdist.layers.Embedding(23, 4, int(shards), combiner="mean", mask_zero=True, seed=2, dtype=dtype)(items)
    both = keras.layers.Concatenate()([rows, seen])
    return keras.Model([user, items], keras.layers.Dense(1, kernel_initializer="ones", dtype="float32")(both))


def build_shared():
    first, second = keras.Input((), dtype="int64"), keras.Input((3,), dtype="int64")
    layer = tfdist.layers.Embedding(USERS, 4, combiner="sum", seed=1, name="users")
    both = [layer(first[:, None]), layer(second)]
    return keras.Model([first, second], keras.layers.Dot(1)(both))


def sgd(**arguments):
    return keras.optimizers.SGD(0.05, **arguments)


def use(optimizer=sgd, make=build, row_updates="auto", **compiled):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    set_options(trainer.strategy, row_updates=row_updates)
    with trainer.scope():
        model = make()
        model.compile(optimizer(), "mse", **compiled)
    return model


def fit(model, y=Y, epochs=2, callbacks=()):
    history = trainer.fit(
        model, X, y, batch_size=BATCH, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
    )
    return next(iter(history.history.values()))


def saved(model):
    """Returns the hashes of the arrays of a saved model and its optimizer, and rows of the table of users."""
    path = os.path.join(out, "model.keras")
    trainer.save(model, path, delete_backup=False)
    weights_path = os.path.join(out, "model.weights.h5")
    model.save_weights(weights_path)
    if not trainer.is_chief:
        return None, None
    loaded = keras.models.load_model(path, {"CustomStep": CustomStep})
    variables = list(with_tables([*loaded.weights, *loaded.optimizer.variables], [loaded.optimizer]))
    hashes, again = [], []
    for found in (hashes, again):
        found += [hashlib.sha256(np.asarray(variable.numpy()).tobytes()).hexdigest() for variable in variables]
        for variable in loaded.weights:
            variable.assign(keras.ops.zeros_like(variable))
        loaded.load_weights(weights_path)
    assert hashes == again
    return hashes, loaded.get_layer("users").table.numpy()[X[0]]


class BreakError(Exception):
    """Ends a training."""


class Break(keras.callbacks.Callback):
    """Ends a training before the step after the backup, if it has restored one, and else after that step."""

    steps = 0

    def __init__(self, restores):
        super().__init__()
        self.restores = restores

    def on_train_batch_begin(self, batch, logs=None):
        if self.restores:
            raise BreakError

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps > STEP:
            raise BreakError


def broken(folder, restores):
    """Trains with backups in a folder until a callback ends it. Returns the model."""
    model = use(keras.optimizers.Adam, row_updates="lazy")
    backup = tfdist.BackupAndRestore(folder, save_freq=STEP, delete_checkpoint=False)
    with contextlib.suppress(BreakError):
        fit(model, callbacks=[Break(restores), backup])
    return model


def back_up(folder):
    """Writes a backup; returns the hashes of the state at its step."""
    model = use(keras.optimizers.Adam, row_updates="lazy")
    trainer.fit(model, X, Y, batch_size=BATCH, steps_per_epoch=STEP, verbose=0, shuffle=False)
    hashes = saved(model)[0]
    broken(folder, restores=False)
    return hashes


def restore(folder):
    """Returns the hashes of the state that a backup restores."""
    copied = os.path.join(out, "copied")
    if trainer.is_chief:
        shutil.copytree(folder, copied)
    return saved(broken(copied, restores=True))[0]


def results(model, losses):
    table = model.get_layer("users").table
    held = sum(shard.value.shape.num_elements() * 4 for shard in table.shards)
    hashes, rows = saved(model)
    predicted = trainer.predict(model, X, batch_size=BATCH, verbose=0)
    tested = trainer.evaluate(model, X, Y, batch_size=BATCH, verbose=0)
    return {"losses": losses, "hashes": hashes, "rows": rows, "held": held, "predicted": predicted, "tested": tested}


def train(*args, y=Y, **how):
    model = use(*args, **how)
    return results(model, fit(model, y))


class CustomStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True)[:, 0] - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"error": loss}


def build_custom():
    model = build()
    return CustomStep(model.inputs, model.outputs)


def not_finite():
    trainer.strategy.engine.nan_policy = "skip"
    y = Y.copy()
    y[20] = np.nan
    try:
        return train(y=y)
    finally:
        trainer.strategy.engine.nan_policy = "ignore"


def compressed(optimizer=sgd):
    trainer.compression = "bf16"
    try:
        return train(optimizer)
    finally:
        trainer.compression = None


CASES = {
    "sgd": train,
    "adagrad": lambda: train(keras.optimizers.Adagrad),
    "adam": lambda: train(keras.optimizers.Adam),
    "lazy": lambda: train(keras.optimizers.Adam, row_updates="lazy"),
    "shared": lambda: train(make=build_shared),
    "executions": lambda: train(steps_per_execution=3),
    "eager": lambda: train(run_eagerly=True),
    "custom": lambda: train(make=build_custom),
    "loss_scale": lambda: train(lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**127)),
    "not_finite": not_finite,
    "compressed": compressed,
    "clips": lambda: train(lambda: keras.optimizers.Adam(global_clipnorm=0.02)),
    "clips_scaled": lambda: train(lambda: keras.optimizers.LossScaleOptimizer(sgd(global_clipnorm=0.02))),
    "clips_compressed": lambda: compressed(lambda: sgd(global_clipnorm=0.02)),
    "accumulates": lambda: train(lambda: keras.optimizers.Adam(gradient_accumulation_steps=2, global_clipnorm=0.02)),
    "averages": lambda: train(lambda: keras.optimizers.Adam(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)),
}


def saved_alone():
    """Saves by a callback that the chief alone has; raises its error on all workers."""
    model, said = use(), pathlib.Path(out, "alone.txt")

    def save(epoch, logs):
        try:
            model.save(os.path.join(out, "alone.keras"))
        except tfdist.ConfigError as e:
            said.write_text(str(e))

    fit(model, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=save)] if trainer.is_chief else [])
    raise tfdist.ConfigError(said.read_text())  # all workers have ended `fit`


ERRORS = {
    "lamb": lambda: train(keras.optimizers.Lamb),
    "regularizer": lambda: train(make=lambda: build(embeddings_regularizer="l2")),
    "saved alone": saved_alone,
    "called": lambda: use()([X[0][:2], X[1][:2]]),
}


def error_of(case):
    try:
        ERRORS[case]()
    except tfdist.ConfigError as e:
        return str(e)
    return ""


def run(case):
    action, _, folder = case.partition(":")
    if folder:
        return {"backup": back_up, "restore": restore}[action](folder)
    return error_of(case) if case in ERRORS else CASES[case]()


if __name__ == "__main__":
    harness.store(out, trainer.task.index if trainer.task else 0, {case: run(case) for case in chosen})
