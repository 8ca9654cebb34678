"""Every task of `tools.bench.ps`. Arguments: output folder, options as JSON."""

import json
import pathlib
import sys
import time

import tfdist

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
MODEL, ROUNDS, STEPS = (OPTIONS[name] for name in ("model", "rounds", "steps"))
trainer = tfdist.Trainer("parameter_server")  # workers and servers stay here

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402

from tfdist import data  # noqa: E402
from tfdist.tasks import digits  # noqa: E402

BATCH = 32
strategy = trainer.strategy
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
# The other contenders do as if the strategy were TensorFlow's own.
Stock = tf.distribute.ParameterServerStrategy


def arrays():
    if MODEL == "digits":
        return digits.load()[0]
    rng = np.random.default_rng(0)
    return rng.standard_normal((512, 1024), np.float32), rng.integers(0, 10, 512, np.int32)


def build(library):
    if MODEL == "mlp":
        hidden = [library.layers.Dense(2048, activation="relu") for _ in range(3)]
        return library.Sequential([library.Input((1024,)), *hidden, library.layers.Dense(10)])
    layers = [library.Input((8, 8, 1))]
    for filters in (32, 64):
        layers += [
            library.layers.Conv2D(filters, 3, padding="same", use_bias=False),
            library.layers.BatchNormalization(momentum=0.9),
            library.layers.ReLU(),
            library.layers.MaxPooling2D(),
        ]
    return library.Sequential([*layers, library.layers.Flatten(), library.layers.Dense(10)])


def dataset(context):
    return data.epochs(arrays(), context, BATCH, seed=1)


def clocked(library):
    """A callback that takes the time of the second epoch; the first one starts the iterators."""

    class Clock(library.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds = time.perf_counter() - self.started

    return Clock()


def compiled(library):
    model = build(library)
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(library.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def of_trainer():
    with trainer.scope():
        model = compiled(keras)

    def run():
        clock = clocked(keras)
        trainer.fit(model, dataset, steps_per_epoch=STEPS, epochs=2, verbose=0, callbacks=[clock])
        return STEPS / clock.seconds

    return run


def of_loop():
    with Stock.scope(strategy):
        model = build(keras)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def step(iterator):
        def replica_step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                predictions = model(x, training=True)
                loss = loss_function(y, predictions)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, predictions)
            return loss

        return strategy.run(replica_step, args=(next(iterator),))

    alone = tf.distribute.InputContext(1, 0, 1)
    per_worker = coordinator.create_per_worker_dataset(tf.function(lambda: dataset(alone)))
    iterator = iter(per_worker)

    def run():
        for _ in range(2):
            started = time.perf_counter()
            for _ in range(STEPS):
                coordinator.schedule(step, args=(iterator,))
            coordinator.join()
        return STEPS / (time.perf_counter() - started)

    return run


def of_tf_keras():
    with Stock.scope(strategy):
        model = compiled(tf_keras)
    creator = tf_keras.utils.experimental.DatasetCreator(lambda context: dataset(tf.distribute.InputContext(1, 0, 1)))

    def run():
        clock = clocked(tf_keras)
        strategy.distribute_datasets_from_function = Stock.distribute_datasets_from_function.__get__(strategy)
        model.fit(creator, steps_per_epoch=STEPS, epochs=2, verbose=0, callbacks=[clock])
        del strategy.distribute_datasets_from_function
        return STEPS / clock.seconds

    return run


made = {"trainer": of_trainer, "loop": of_loop, "tf_keras": of_tf_keras}
contenders = {name: make() for name, make in made.items() if name in (OPTIONS["contenders"] or made)}
rates = {name: [] for name in contenders}
for number in range(ROUNDS + 1):
    for name, run in contenders.items():
        found = run()
        if number:  # the first round traces
            rates[name].append(found)
(FOLDER / "results.json").write_text(json.dumps({"steps_per_second": rates}))
