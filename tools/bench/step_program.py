"""One task of `tools.bench.step`. Arguments: output folder, options as JSON."""

import functools
import json
import os
import pathlib
import sys
import time

import tfdist

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
MODEL, EXECUTION, ROUNDS, STEPS = (OPTIONS[name] for name in ("model", "steps_per_execution", "rounds", "steps"))
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[RANK % len(cores)]})

trainer = tfdist.Trainer("multi_worker_mirrored")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402

from tfdist import data  # noqa: E402
from tfdist.monitoring.throughput import Throughput  # noqa: E402
from tfdist.tasks import digits  # noqa: E402

BATCH = 32  # examples per worker and step
strategy = trainer.strategy


def arrays():
    if MODEL == "digits":
        return digits.load()[0]
    rng = np.random.default_rng(0)
    return rng.standard_normal((4096, 1024), np.float32), rng.integers(0, 10, 4096, np.int32)


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
    return library.Sequential(
        [*layers, library.layers.Flatten(), library.layers.Dropout(0.3), library.layers.Dense(10)]
    )


def compiled(library):
    model = build(library)
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["accuracy"] if MODEL == "digits" else None
    model.compile(library.optimizers.Adam(1e-3), loss, metrics=metrics, steps_per_execution=EXECUTION)
    return model


def dataset(context):
    return data.epochs(arrays(), context, BATCH * context.num_replicas_in_sync, seed=1)


class Times:
    """Medians need single times: those of each call of fit's loop, divided by its steps."""

    def __init__(self, library):
        self.seconds = []

        class Clock(library.callbacks.Callback):
            def on_train_batch_end(_, batch, logs=None):
                self.tick()

        self.callback = Clock()
        self.last = None

    def tick(self):
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append((now - self.last) / EXECUTION)
        self.last = now

    def take(self):
        seconds, self.seconds, self.last = self.seconds, [], None
        return float(np.median(seconds))


def of_trainer():
    with trainer.scope():
        model = compiled(keras)

    def run():
        clock = Throughput(BATCH)
        trainer.fit(model, dataset, steps_per_epoch=STEPS, epochs=1, verbose=0, callbacks=[clock])
        return float(np.median(clock.step_seconds))

    return run


def of_loop(execution):
    """As TensorFlow's tutorials have it: the loss is reduced at each step, metrics are read at the end."""
    with trainer.scope():
        model = build(keras)
        optimizer = keras.optimizers.Adam(1e-3)
        optimizer.build(model.trainable_variables)
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def replica_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = tf.nn.compute_average_loss(losses(y, predictions))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if MODEL == "digits":
            accuracy.update_state(y, predictions)
        return loss

    @tf.function
    def step(iterator):
        loss = tf.constant(0.0)
        for _ in tf.range(execution):
            loss = strategy.reduce("SUM", strategy.run(replica_step, (next(iterator),)), axis=None)
        return loss

    @tf.function
    def single_step(iterator):
        return strategy.reduce("SUM", strategy.run(replica_step, (next(iterator),)), axis=None)

    function = single_step if execution == 1 else step
    iterator = iter(strategy.distribute_datasets_from_function(dataset))

    def run():
        seconds = []
        for _ in range(STEPS // execution):
            start = time.perf_counter()
            function(iterator)
            seconds.append((time.perf_counter() - start) / execution)
        return float(np.median(seconds[1:]))

    return run


def of_tf_keras():
    with tf.distribute.MultiWorkerMirroredStrategy.scope(strategy):
        model = compiled(tf_keras)
    distributed = strategy.distribute_datasets_from_function(dataset)

    def run():
        times = Times(tf_keras)
        model.fit(distributed, steps_per_epoch=STEPS, epochs=1, verbose=0, callbacks=[times.callback])
        return times.take()

    return run


made = {"trainer": of_trainer, "loop": functools.partial(of_loop, 1), "tf_keras": of_tf_keras}
if EXECUTION > 1:
    made["loop of executions"] = functools.partial(of_loop, EXECUTION)
contenders = {name: make() for name, make in made.items() if name in (OPTIONS["contenders"] or made)}
seconds = {name: [] for name in contenders}
for number in range(ROUNDS + 1):
    for name, run in contenders.items():
        found = run()
        if number:  # the first round compiles
            seconds[name].append(found)
if RANK == 0:
    (FOLDER / "results.json").write_text(json.dumps({"seconds": seconds}))
