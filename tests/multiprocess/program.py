"""What the tests of this folder compare between strategies. Arguments: strategy, output folder, names of scenarios.

Without names it runs those of `models.QUICK`.
"""

import functools
import json
import os
import pathlib
import sys

import tfdist
from tests.helpers.options import set_options
from tests.multiprocess import harness, models
from tfdist.training import callback_sync

name, out, *chosen = sys.argv[1:]
trainer = tfdist.Trainer(name, **({"devices": 2} if name in ("mirrored", "central_storage") else {}))
set_options(trainer.strategy, bucket_bytes=2000)  # several of each model
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if "TF_CONFIG" in os.environ else 0

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402


class Power(keras.metrics.Sum):
    """The sum of a power of the targets, for which each example has a number of its own."""

    def __init__(self, exponent):
        super().__init__(name=f"power{exponent}")
        self.exponent = exponent

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true**self.exponent)


def coverage():
    """An unseeded program that shuffles: comes first, before anything sets a seed."""
    with trainer.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Power(0), Power(1), Power(2), Power(3)])
    numbers = np.arange(96, dtype=np.float32)[:, None]
    return model.fit(numbers / 96, numbers, batch_size=32, epochs=3, shuffle=True, verbose=0).history


def parity(cases=models.QUICK_CASES):
    """Bare model.fit, as an unmodified script has it."""
    results = {}
    for case in cases:
        build, optimizer = models.CASES[case]
        with trainer.scope():
            model = models.compiled(keras, build, optimizer)
        results[case] = models.train(model, *models.data(model))
    return results


def further_parity():
    """The other cases."""
    return parity([case for case in models.CASES if case not in models.QUICK_CASES])


def trainer_fit():
    """The same through the Trainer, with arrays."""
    with trainer.scope():
        model = models.compiled(keras, models.cnn, "sgd")
    x, y = models.data(model)
    return models.train(model, x, y, lambda *args, **kwargs: trainer.fit(model, *args, **kwargs))


def inference(sizes=models.QUICK_SIZES):
    """evaluate and predict for sizes around the boundaries, from arrays, a dataset and four files."""
    with trainer.scope():
        model = models.compiled(keras, models.cnn, "sgd")
    results = {}
    for size in [each for each in sizes if each != "files"]:
        x, y = models.data(model, size, seed=3)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(models.BATCH)
        results[size] = {
            "trainer": (trainer.evaluate(model, dataset, verbose=0), trainer.predict(model, dataset, verbose=0))
        }
        if size in (1, 5, 63):  # Keras makes such a dataset of arrays
            bare = {"dataset": (model.evaluate(dataset, verbose=0), model.predict(dataset, verbose=0))}
        else:
            arrays = {"batch_size": models.BATCH, "verbose": 0}
            bare = {"arrays": (model.evaluate(x, y, **arrays), model.predict(x, **arrays))}
        results[size] |= bare
    if "files" not in sizes:
        return results
    files = []
    for number in range(4):
        path = pathlib.Path(out, f"part{number}-{RANK}.txt")
        path.write_text("".join(f"{10 * number + line}\n" for line in range(7)))
        files.append(str(path))

    def parse(line):
        value = tf.strings.to_number(line)
        return tf.fill([6, 6, 1], value / 40), tf.cast(value, tf.int32) % 3

    lines = tf.data.Dataset.from_tensor_slices(files).interleave(tf.data.TextLineDataset, cycle_length=1).map(parse)
    by_files = tf.data.Options()
    by_files.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    results["files"] = {
        "bare": (model.evaluate(lines.batch(8), verbose=0), model.predict(lines.batch(8), verbose=0)),
        "trainer": (
            trainer.evaluate(model, lines.batch(8), verbose=0),
            trainer.predict(model, lines.batch(8).with_options(by_files), verbose=0),
        ),
    }
    return results


def further_inference():
    """The other sizes."""
    return inference([size for size in models.SIZES if size not in models.QUICK_SIZES])


def everything():
    """A model with BatchNorm, Dropout and Adam, trained through the Trainer, and saved by every rank."""
    keras.utils.set_random_seed(5)
    with trainer.scope():
        model = keras.Sequential(
            [
                keras.Input((12,)),
                keras.layers.Dense(16, use_bias=False),
                keras.layers.BatchNormalization(momentum=0.7),
                keras.layers.Dropout(0.4),
                keras.layers.Dense(3),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x, y = models.data(model)
    validation = (x[:45], y[:45])
    history = trainer.fit(
        model, x, y, batch_size=32, epochs=2, shuffle=True, verbose=0, validation_data=validation
    ).history
    variables = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
    trainer.export(model, os.path.join(out, "exported", "1"))
    trainer.save(model, os.path.join(out, "model.keras"))
    saved = {"there": os.path.exists(os.path.join(out, "model.keras"))}
    predictions = trainer.predict(model, x[:45], verbose=0)
    evaluation = trainer.evaluate(model, x[:45], y[:45], verbose=0)
    if trainer.is_chief:  # alone: nothing in it may wait for a peer
        model.save(os.path.join(out, "chief.keras"))
    return {
        "history": history,
        "variables": variables,
        "predictions": predictions,
        "evaluation": evaluation,
        "statistics": [
            [component.numpy() for component in trainer.strategy.experimental_local_results(v.value)]
            for v in model.layers[1].non_trainable_variables
        ],
        "saved": saved,
    }


class Recorder(keras.layers.Layer):
    """Keeps which elements were dropped from what each replica last saw."""

    def build(self, shape):
        # Whole numbers, and no weight: of weights the replicas would share the mean, or hold the same.
        self.seen = tf.Variable(tf.zeros([16 // trainer.num_replicas, shape[-1]], tf.int32), trainable=False)

    def call(self, x):
        self.seen.assign(keras.ops.cast(keras.ops.not_equal(x, 0), "int32"))
        return x


def dropout():
    """The masks of this process's replicas, `[model, step, replica, example, feature]`."""
    strategy = trainer.strategy
    masks = []
    for _ in range(2):
        keras.utils.set_random_seed(11)
        shared = name == "central_storage"  # whose one copy of the recorder's variable cannot hold both masks
        with trainer.scope():
            recorder = keras.layers.Identity() if shared else Recorder()
            model = keras.Sequential([keras.Input((40,)), keras.layers.Dropout(0.5), recorder, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        ones = np.ones((16, 40), np.float32)
        drop = tf.function(lambda: strategy.run(lambda: model.layers[0](ones[:8], training=True)))  # noqa: B023
        steps = []
        for _ in range(2):
            if shared:
                components = strategy.experimental_local_results(drop())
            else:
                model.fit(ones, np.zeros((16, 1), np.float32), batch_size=16, verbose=0)
                components = strategy.experimental_local_results(recorder.seen)
            steps.append([component.numpy() != 0 for component in components])
        masks.append(steps)
    return np.array(masks)


class Noise(keras.layers.Layer):
    """Keeps what each replica has drawn in its last step.

    As integers, since floating-point variables are averaged; and not as a weight, which must be equal on all workers.
    """

    def __init__(self):
        super().__init__()
        self.inner = tf.function(lambda: tf.random.uniform([16]))

    def build(self, shape):
        self.seen = tf.Variable(tf.zeros([5, 16], tf.int32), trainable=False)

    def call(self, x, training=False):
        if training:
            draws = [tf.random.uniform([16]), self.inner(), tf.nn.dropout(tf.ones([16]), 0.5) / 2]
            one = tf.cond(tf.size(x) > 0, lambda: tf.random.uniform([16]), lambda: tf.zeros([16]))
            self.seen.assign(tf.cast(tf.stack([*draws, one, keras.random.uniform([16])]) * 1e6, tf.int32))
        return x


def noise(ways=("trainer",)):
    """What this process's replicas have drawn, `[way, step, replica, kind, 16]`, twice each; seeds after a state tree."""
    found = {}
    for way in ways:
        for attempt in range(2):
            keras.utils.set_random_seed(11)
            with trainer.scope():
                model = keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
                model.compile("sgd", "mse", run_eagerly=way == "eager")
            fit = model.fit if way == "bare" else functools.partial(trainer.fit, model)
            steps = []

            class Keep(keras.callbacks.Callback):
                def on_train_batch_end(self, batch, logs=None, model=model, steps=steps):
                    seen = trainer.strategy.experimental_local_results(model.layers[0].seen)
                    steps.append([component.numpy() for component in seen])

            ones = np.ones((12, 4), np.float32)
            fit(ones, ones[:, :1], batch_size=4, verbose=0, callbacks=[Keep()])
            found[way, attempt] = np.array(steps)
    seed = model.layers[1].seed_generator.state

    def states():
        return [component.numpy().tolist() for component in trainer.strategy.experimental_local_results(seed.value)]

    before, tree = states(), model.get_state_tree("numpy_array")
    model.layers[1].seed_generator.next()
    model.set_state_tree(tree)
    return {"draws": found, "before": before, "after": states()}


def further_noise():
    """The same of the model's own fit, and without graphs."""
    return noise(["bare", "eager"])


class ChiefReads(keras.callbacks.Callback):
    """Reads in the middle of an epoch and of a validation, and changes the learning rate."""

    def on_test_batch_end(self, batch, logs=None):
        self.model.get_weights()

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.save_weights(os.path.join(out, "step.weights.h5"))
            self.model.optimizer.learning_rate = 0.01


def callbacks():
    """A user's callbacks on every rank, and on the chief alone."""
    results = {}
    for who in ("every", "chief"):
        folder = pathlib.Path(out, who)
        keras.utils.set_random_seed(5)
        with trainer.scope():
            model = models.compiled(keras, models.cnn, "sgd")
        x, y = models.data(model)
        mine = [
            keras.callbacks.ModelCheckpoint(folder / "checkpoint-{epoch}.keras"),
            keras.callbacks.ModelCheckpoint(folder / "best.keras", monitor="val_loss", save_best_only=True),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.TensorBoard(folder / "tensorboard", histogram_freq=1),
            # Never satisfied: stops after the second epoch and puts back the first one's weights.
            keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1, restore_best_weights=True),
        ]
        if who == "every":
            evaluate = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: model.evaluate(x[:32], y[:32], verbose=0)  # noqa: B023
            )
            mine = [evaluate, *mine]
        if who == "chief":
            mine += [keras.callbacks.ModelCheckpoint(folder / "step.keras", save_freq=2), ChiefReads()]
        folder.mkdir(exist_ok=True)
        if who == "chief" and not trainer.is_chief:
            mine = []
        history = trainer.fit(
            model, x, y, batch_size=32, epochs=5, verbose=2, callbacks=mine, validation_data=(x[:45], y[:45])
        )
        results[who] = {
            "epochs": history.epoch,
            "history": history.history,
            "print": callback_sync.fingerprint([*model.weights, *model.optimizer.variables]),
            "rate": float(model.optimizer.learning_rate.numpy()),
        }
    return results


def fine_tuning():
    """A model of plain Keras, loaded in the scope after `Normalization.adapt` in it."""
    keras.utils.set_random_seed(7)
    x, y = np.random.default_rng(2).normal(5, 3, (96, 12)).astype(np.float32), models.data(models.dense(keras))[1]
    with trainer.scope():
        normalization = keras.layers.Normalization()
        normalization.adapt(x)
        head = keras.Sequential([keras.Input((12,)), normalization, models.dense(keras)])
        head.set_weights(
            [
                np.random.default_rng(3).uniform(-0.3, 0.3, w.shape).astype(w.dtype) if i > 2 else w
                for i, w in enumerate(head.get_weights())
            ]
        )
        head.compile(
            keras.optimizers.SGD(0.05, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    path = os.path.join(out, "pretrained.keras")
    trainer.fit(head, x, y, batch_size=32, epochs=1, shuffle=False, verbose=0)
    trainer.save(head, path)
    with trainer.scope():
        model = keras.models.load_model(path)
    history = trainer.fit(model, x, y, batch_size=32, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": model.get_weights(), "predictions": trainer.predict(model, x, verbose=0)}


SCENARIOS = (
    coverage,
    parity,
    trainer_fit,
    inference,
    everything,
    dropout,
    noise,
    callbacks,
    fine_tuning,
    further_parity,
    further_inference,
    further_noise,
)
chosen = chosen or models.QUICK[name]
results = {scenario.__name__: scenario() for scenario in SCENARIOS if scenario.__name__ in chosen}
results["is_chief"] = trainer.is_chief
harness.store(out, RANK, results)
