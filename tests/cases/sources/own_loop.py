"""Loops of your own around `trainer.step` train what a plain eager loop does. tests/multiprocess/test_own_loop.py kills them."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.cases.arms import MIRRORED, ONE_DEVICE, SERVERS, WORKERS
from tests.cases.case import case

rng = np.random.default_rng(0)
REAL = rng.normal(2.0, 0.5, (20, 2)).astype(np.float32)
NOISE = rng.standard_normal((20, 3)).astype(np.float32)


class Adversaries:
    """Two models, of which each has an optimizer."""

    def __init__(self, scope):
        keras.utils.set_random_seed(1)
        with scope:
            self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])
            self.critic = keras.Sequential([keras.Input((2,)), layers.Dense(4, "tanh"), layers.Dense(1)])
            self.make = keras.optimizers.Adam(0.02, clipnorm=1.0)
            self.judge = keras.optimizers.SGD(0.1, momentum=0.9)
            self.right = keras.metrics.Mean(name="right")

    def parts(self):
        return [self.generator, self.critic, self.make, self.judge, self.right]

    def step(self, batch):
        """One round."""
        real, noise = batch
        with tf.GradientTape(persistent=True) as tape:
            made = self.generator(noise, training=True)
            good, bad = self.critic(real, training=True), self.critic(made, training=True)
            judged = tf.reduce_mean(tf.nn.softplus(-good) + tf.nn.softplus(bad))
            fooled = tf.reduce_mean(tf.nn.softplus(-bad))
        weights = self.critic.trainable_variables
        self.judge.apply_gradients(zip(tape.gradient(judged, weights), weights, strict=True))
        weights = self.generator.trainable_variables
        self.make.apply(tape.gradient(fooled, weights), weights)
        self.right.update_state(tf.cast(good > 0, tf.float32))
        return {"judged": judged, "fooled": fooled, "right": self.right.result()}

    def state(self):
        return [np.asarray(v) for each in self.parts()[:4] for v in each.variables if v.dtype == "float32"]


def plain(batches, epochs):
    """Returns what the same functions make in an eager loop without tfdist."""
    expected = Adversaries(contextlib.nullcontext())
    logs = []
    for _ in range(epochs):
        expected.right.reset_state()
        logs += [{name: float(value) for name, value in expected.step(batch).items()} for batch in batches]
    return logs, expected.state()


@case(ONE_DEVICE, MIRRORED, WORKERS, SERVERS, full=(ONE_DEVICE, MIRRORED, SERVERS))
def adversaries(world):
    data = tf.data.Dataset.from_tensor_slices((REAL, NOISE)).batch(7)  # 7, 7 and 6
    found = Adversaries(world.scope())
    run = world.trainer.step(found.step, uses=found.parts())
    logs = [run(batch) for batch in run.loop(data, epochs=4)]
    right_logs, right = plain(data, 4)
    return {"logs": (logs, right_logs), "state": (found.state(), right)}


@case(MIRRORED, WORKERS, full=True)
def batches_of_each_process(world):
    """Without a loop each process gives a batch of its own, of which every replica of it takes all."""
    found = Adversaries(world.scope())
    run = world.trainer.step(found.step, uses=found.parts())
    own = slice(world.rank, None, world.workers)
    logs = [run((REAL[own], NOISE[own])) for _ in range(4)]
    expected = Adversaries(contextlib.nullcontext())
    right_logs = [{name: float(value) for name, value in expected.step((REAL, NOISE)).items()} for _ in range(4)]
    return {"logs": (logs, right_logs), "state": (found.state(), expected.state())}
