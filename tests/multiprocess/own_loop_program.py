"""A loop of your own around `trainer.step`. Arguments: strategy, output folder, step at which it kills itself."""

import os
import pathlib
import signal
import sys

import tfdist
from tfdist.runtime.report import progress

strategy, out, kill = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
how = {"devices": 2} if strategy == "mirrored" else {}
trainer = tfdist.Trainer(strategy, backup=tfdist.BackupAndRestore(out / "backup", save_freq=4), **how)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tests.multiprocess import harness  # noqa: E402
from tests.multiprocess.waiting import wait_until  # noqa: E402

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
REAL = rng.normal(2.0, 0.5, (20, 2)).astype(np.float32)
NOISE = rng.standard_normal((20, 3)).astype(np.float32)
layers = keras.layers
kill = 0 if progress.restarts() else kill

with trainer.scope():
    generator = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dropout(0.5), layers.Dense(2)],
    )
    critic = keras.Sequential([keras.Input((2,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    make, judge = keras.optimizers.Adam(0.02, clipnorm=1.0), keras.optimizers.SGD(0.1, momentum=0.9)
    seeds = keras.random.SeedGenerator(3)
    right = keras.metrics.Mean(name="right")


def step(batch):
    """One round of adversaries, of which each has an optimizer."""
    real, noise = batch
    noise += keras.random.normal(tf.shape(noise), seed=seeds)
    with tf.GradientTape(persistent=True) as tape:
        made = generator(noise, training=True)
        good, bad = critic(real, training=True), critic(made, training=True)
        judged = tf.reduce_mean(tf.nn.softplus(-good) + tf.nn.softplus(bad))
        fooled = tf.reduce_mean(tf.nn.softplus(-bad))
    judge.apply_gradients(
        zip(tape.gradient(judged, critic.trainable_variables), critic.trainable_variables, strict=True)
    )
    make.apply(tape.gradient(fooled, generator.trainable_variables), generator.trainable_variables)
    right.update_state(tf.cast(good > 0, tf.float32))
    return {"judged": judged, "fooled": fooled, "right": right.result()}


data = tf.data.Dataset.from_tensor_slices((REAL, NOISE)).shuffle(20).batch(8)
run = trainer.step(step, uses=[generator, critic, make, judge, right, seeds])
logs = []
for number, batch in enumerate(run.loop(data, epochs=4), 1):
    logs.append(run(batch))
    if number == kill and trainer.task.index == trainer.num_replicas - 1 - (strategy == "mirrored"):
        wait_until((out / "backup/step-4/manifest.json").exists, 60)  # written beside the steps
        os.kill(os.getpid(), signal.SIGKILL)
weights = [w.numpy() for each in (generator, critic) for w in each.weights]
slots = [np.asarray(w) for each in (make, judge) for w in each.variables]
results = {"logs": logs, "weights": weights, "optimizers": slots, "seeds": np.asarray(seeds.state)}
harness.store(out, trainer.task.index, results)
