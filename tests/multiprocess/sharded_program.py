"""Trains each case with the optimizer's state on every replica and split over the workers. Arguments: strategy (`mirrored:2` has two
devices), output folder, and cases.

Stores for each case: the hash of all weights of both trainings, the losses, and the bytes of the optimizer's state in this process. A
case of `ERRORS` stores the text of an error instead.
"""

import hashlib
import os
import sys

os.environ["TF_NUM_INTRAOP_THREADS"] = "1"

import tfdist
from tests.helpers.options import set_options
from tests.multiprocess import harness
from tfdist.compat import piece_optimizer
from tfdist.compat.split_value import SplitSlot

strategy, out, *chosen = sys.argv[1:]
name, _, devices = strategy.partition(":")
options = {"devices": devices, **harness.transport()}
trainer = tfdist.Trainer(name, bucket_bytes=300, shard_optimizer=True, **options)  # several buckets

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
from keras import optimizers  # noqa: E402

BATCH = 12
rng = np.random.default_rng(0)
X = rng.standard_normal((5 * BATCH + 7, 8)).astype(np.float32)
Y = rng.integers(0, 5, len(X))
trained = []  # the last model
IDS = np.abs(X * 3).astype(np.int32) % 11


class Scale(keras.layers.Layer):
    """Has a scalar variable."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.factor


def build(frozen=False, embeds=True):
    """Returns a model with an embedding, unless told otherwise, a scalar and variables of odd sizes, which no number of workers divides."""
    limit = keras.constraints.MaxNorm(0.8)
    ids, numbers = keras.Input((8,), dtype="int32"), keras.Input((8,))
    words = keras.layers.Flatten()(keras.layers.Embedding(11, 3)(ids)) if embeds else keras.ops.cast(ids, "float32")
    x = keras.layers.Concatenate()([words, keras.layers.Dense(13, activation="tanh", kernel_constraint=limit)(numbers)])
    x = keras.layers.BatchNormalization()(x)
    x = Scale()(keras.layers.Dense(61, activation="tanh", trainable=not frozen, name="hidden")(x))
    return keras.Model([ids, numbers], keras.layers.Dense(5)(x))


def compile_and_fit(model, optimizer, x=X, **compiled):
    with trainer.scope():
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiled)
    return trainer.fit(model, [IDS, x], Y, batch_size=BATCH, epochs=4, verbose=0, shuffle=False)


def train(optimizer, frozen=False, x=X, embeds=True, **compiled):
    """Returns the hash of the weights, the losses, and the bytes of the optimizer's state."""
    keras.utils.set_random_seed(1)
    with trainer.scope():
        model = build(frozen, embeds)
    history = compile_and_fit(model, optimizer, x, **compiled)
    if frozen:
        model.get_layer("hidden").trainable = True
        history = compile_and_fit(model, optimizer, x)
    trained[:] = [model]
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    return hashlib.sha256(weights).hexdigest(), history.history["loss"], bytes_of(model.optimizer)


def bytes_of(optimizer):
    """Returns the bytes of an optimizer's state in this process."""
    components = []
    for variable in optimizer.variables:
        if isinstance(variable, SplitSlot):
            components += variable.variables()
        else:
            components += trainer.strategy.experimental_local_results(variable.value)
    return sum(component.dtype.size * component.shape.num_elements() for component in components)


def without_decay_of_biases():
    optimizer = optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def unfinite():
    trainer.strategy.engine.nan_policy = "skip"
    x = X.copy()
    x[20] = np.nan
    try:
        return train(lambda: optimizers.Adam(0.01), x=x)
    finally:
        trainer.strategy.engine.nan_policy = "ignore"


def compressed():
    trainer.compression = "int8"
    try:
        return train(lambda: optimizers.Adam(0.01))
    finally:
        trainer.compression = None


def rounded():
    """Returns the weights of a linear model after each step, sent as bfloat16, and this process's float32 values: (first element, values)."""
    set_options(trainer.strategy, weights_dtype="bfloat16")
    weights = []
    try:
        with trainer.scope():
            model = keras.Sequential(
                [keras.Input((8,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
            )
            model.compile(optimizers.SGD(2**-11, 0.5), "mse")
        keeps = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: weights.append(model.get_weights()[0])
        )
        trainer.fit(model, X, Y[:, None], batch_size=BATCH, epochs=3, verbose=0, shuffle=False, callbacks=[keeps])
    finally:
        set_options(trainer.strategy, weights_dtype="float32")
    master = piece_optimizer.state_variables(model.optimizer)[-1]
    return weights, (master.holder.index[0].start, master.value.numpy())


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1, 0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "lion": lambda: optimizers.Lion(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "adamax": lambda: optimizers.Adamax(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.AdamW(0.01, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, 0.9, clipvalue=0.01),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "clipped_accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.01, 5, 0.9)),
    "averages": lambda: optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.8, weight_decay=0.1),
    "overwriting_averages": lambda: optimizers.SGD(
        0.1, 0.9, use_ema=True, ema_overwrite_frequency=3, gradient_accumulation_steps=2
    ),
    "loss_scale_factor": lambda: optimizers.Adam(0.01, loss_scale_factor=8.0),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=2.0**20),
    "without_decay_of_biases": without_decay_of_biases,
}
ROUND_ROWS = {"rmsprop", "adagrad", "adadelta", "ftrl"}  # round rows of an embedding differently from dense gradients
CASES = {
    **{
        case: lambda case=case, optimizer=optimizer: train(optimizer, embeds=case not in ROUND_ROWS)
        for case, optimizer in OPTIMIZERS.items()
    },
    "frozen": lambda: train(OPTIMIZERS["adam"], frozen=True),
    "executions": lambda: train(OPTIMIZERS["adam"], steps_per_execution=3),
    "unfinite": unfinite,
    "compressed": compressed,
}


class OwnUpdate(optimizers.SGD):
    """Updates by its own rule."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


def dense():
    """Returns a compiled model that plain Keras loads without classes of this file."""
    with trainer.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(61, "tanh"), keras.layers.Dense(5)])
        model.compile(optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit_dense(model, *callbacks, epochs=2):
    trainer.fit(model, X, Y, batch_size=BATCH, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def content(path):
    """Returns the weights and slots that plain Keras loads from a file."""
    if path.endswith(".keras"):
        model = keras.models.load_model(path)
    else:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(61, "tanh"), keras.layers.Dense(5)])
        model.compile(optimizers.Adam(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
    return [np.array(value) for value in (*model.weights, *model.optimizer.variables)]


def written():
    """Returns what plain Keras loads of each file that all workers write together, and of that of `trainer.save`."""
    set_options(trainer.strategy, shard_optimizer=True)
    model, checkpoint = dense(), keras.callbacks.ModelCheckpoint
    place = {"best.keras": {"monitor": "loss", "save_best_only": True}, "each-{epoch}.keras": {}}
    place["step.weights.h5"] = {"save_weights_only": True, "save_freq": 3}
    place["last.weights.h5"] = {"save_weights_only": True}
    fit_dense(model, *(checkpoint(os.path.join(out, file), **options) for file, options in place.items()))
    model.save_weights(os.path.join(out, "saved.weights.h5"))
    model.save(os.path.join(out, "saved.keras"))
    keras.saving.save_model(model, os.path.join(out, "function.keras"))
    model.save_weights(os.path.join(out, "parts.weights.json"), max_shard_size=1e-5)
    trainer.save(model, os.path.join(out, "trainer.keras"))
    if not trainer.is_chief:
        return {}
    kinds = (".keras", ".weights.h5", ".weights.json")
    files = [file for file in os.listdir(out) if file.endswith(kinds) and not file.startswith("parts_")]
    return {file: content(os.path.join(out, file)) for file in files}


def saved_by_the_chief():
    """Returns the errors of saves of a callback that the chief alone has; the training goes on."""
    set_options(trainer.strategy, shard_optimizer=True)
    model, errors, epochs = dense(), {}, []

    class Saves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for save, file in ((self.model.save_weights, "alone.weights.h5"), (self.model.save, "alone.keras")):
                try:
                    save(os.path.join(out, file))
                except tfdist.ConfigError as e:
                    errors[file] = str(e)

    counts = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    fit_dense(model, counts, *([Saves()] if trainer.is_chief else []))
    return errors, epochs


def swapped_averages():
    with trainer.scope():
        model = build()
        model.compile(OPTIMIZERS["averages"](), "mse")
    trainer.fit(model, [IDS, X], Y, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights(), begins()])


def begins():
    return keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))


def fit_with(optimizer):
    return lambda: compile_and_fit(build(), optimizer)


def checkpoint(file, ranks):
    def fit():
        writer = keras.callbacks.ModelCheckpoint(os.path.join(out, file))
        fit_dense(dense(), begins(), *([writer] if trainer.task.index in ranks else []))

    return fit


begun = []  # the epochs of the case that have begun
ALONE = {"written": written, "saved_by_the_chief": saved_by_the_chief, "rounded": rounded}
ERRORS = {
    "old_format": checkpoint("model.h5", range(9)),
    "checkpoint_of_the_chief": checkpoint("chief.keras", range(1)),
    "lamb": fit_with(optimizers.Lamb),
    "own_update": fit_with(OwnUpdate),
    "swapped_averages": swapped_averages,
}


def error_of(case):
    begun.clear()
    with trainer.scope():
        try:
            ERRORS[case]()
        except (tfdist.ConfigError, tfdist.ClusterError) as e:
            return f"after {len(begun)} epochs: {e}"
    return ""


if __name__ == "__main__":
    results = {}
    for case in chosen:
        if case in ALONE:
            results[case] = ALONE[case]()
            continue
        if case in ERRORS:
            results[case] = error_of(case)
            continue
        results[case] = {}
        for way in ("whole", "sharded"):
            set_options(trainer.strategy, shard_optimizer=way == "sharded")
            results[case][way] = CASES[case]()
    harness.store(out, trainer.task.index, results)
