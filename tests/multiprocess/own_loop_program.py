"""Loops of your own around `trainer.step`. Arguments: strategy or "plain", output folder, case, step at which it kills itself.

Under "plain" the same functions run in an eager loop without tfdist.
"""

import os
import pathlib
import signal
import sys

strategy, out, case, kill = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
trainer = None
if strategy != "plain":
    import tfdist
    from tfdist.runtime import progress as progress_lib

    how = {"devices": 2} if strategy == "mirrored" else {}
    trainer = tfdist.Trainer(strategy, backup=tfdist.BackupAndRestore(out / "backup", save_freq=4), **how)
    kill = 0 if progress_lib.restarts() else kill

import contextlib  # noqa: E402 (the strategy comes first)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tests.multiprocess import harness  # noqa: E402
from tests.multiprocess.waiting import wait_until  # noqa: E402

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
REAL = rng.normal(2.0, 0.5, (20, 2)).astype(np.float32)
NOISE = rng.standard_normal((20, 3)).astype(np.float32)
layers = keras.layers
RESUMED = case == "resumed"

with trainer.scope() if trainer else contextlib.nullcontext():
    drops = [layers.Dropout(0.5)] if RESUMED else []
    generator = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), *drops, layers.Dense(2)])
    critic = keras.Sequential([keras.Input((2,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    make, judge = keras.optimizers.Adam(0.02, clipnorm=1.0), keras.optimizers.SGD(0.1, momentum=0.9)
    seeds = keras.random.SeedGenerator(3)
    right = keras.metrics.Mean(name="right")


def step(batch):
    """One round of adversaries, of which each has an optimizer."""
    real, noise = batch
    if RESUMED:
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


data = tf.data.Dataset.from_tensor_slices((REAL, NOISE))
data = data.shuffle(20).batch(8) if RESUMED else data.batch(7)
logs = []
WHOLE = case == "whole_batches"
if trainer:
    run = trainer.step(step, uses=[generator, critic, make, judge, right, seeds])
    # Without a loop: each process gives a batch of its own, of which every replica of it takes all.
    own = slice(trainer.task.index, None, 2 if strategy == "multi_worker_mirrored" else 1)
    for _ in range(4 if WHOLE else 0):
        logs.append(run((REAL[own], NOISE[own])))
    for number, batch in enumerate(() if WHOLE else run.loop(data, epochs=4), 1):
        logs.append(run(batch))
        if number == kill and trainer.task.index == trainer.num_replicas - 1 - (strategy == "mirrored"):
            wait_until((out / "backup/step-4/manifest.json").exists, 60)  # written beside the steps
            os.kill(os.getpid(), signal.SIGKILL)
else:
    for _ in range(4):
        if not WHOLE:
            right.reset_state()
        for batch in [(REAL, NOISE)] if WHOLE else data:
            logs.append({name: float(value) for name, value in step(batch).items()})
weights = [w.numpy() for each in (generator, critic) for w in each.weights]
slots = [np.asarray(w) for each in (make, judge) for w in each.variables]
results = {"logs": logs, "weights": weights, "optimizers": slots, "seeds": np.asarray(seeds.state)}
harness.store(out, trainer.task.index if trainer else 0, results)
