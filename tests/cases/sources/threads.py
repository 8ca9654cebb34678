"""Workers with other numbers of threads train to the same bits, whatever an optimizer sums."""

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.arms import UNLIKE_THREADS
from tests.cases.case import case
from tfdist.collectives import hardware


class Own(keras.optimizers.Optimizer):
    """Divides the whole gradient by its length, as nothing of Keras' does."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient / keras.ops.sqrt(keras.ops.sum(gradient * gradient)))


# Each way of summing a gradient once; "clipnorm" and "accumulated" go with others here, and Lamb and Muon sum as Adafactor.
OPTIMIZERS = {
    "averaged": lambda: keras.optimizers.SGD(0.1, clipnorm=0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulated": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb(0.01)),
    "own": lambda: Own(0.01),
}
FURTHER = {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.01),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
}

rng = np.random.default_rng(0)
X = rng.standard_normal((64, 3000)).astype(np.float32)
Y = rng.standard_normal((64, 64)).astype(np.float32)


def trained(world, trainer, make):
    """Compares the bits of all variables of both workers."""
    with trainer.scope():
        model = keras.Sequential([keras.Input((3000,)), keras.layers.Dense(64)])
        model.compile(make(), "mse")
    model.fit(X, Y, batch_size=16, verbose=0)
    bits = [np.asarray(each).tobytes() for each in (*model.weights, *model.optimizer.variables)]
    chief, worker = world.gather(bits)
    return {"same bits": (chief == worker, True), "finite": (np.isfinite(model.get_weights()[0]).all(), True)}


for name, make in {**OPTIMIZERS, **FURTHER}.items():

    @case(UNLIKE_THREADS, full=name in FURTHER, name=name)
    def _(world, make=make):
        return trained(world, world.trainer, make)


@case(UNLIKE_THREADS)
def the_workers_do_round_differently(world):
    """Or nothing here could fail."""
    long = tf.constant(rng.standard_normal((3000, 64)), tf.float32)
    chief, worker = world.gather(float(tf.reduce_sum(long)))
    return {
        "sums differ": (chief != worker, True),
        "difference": (hardware.describe_difference(world.trainer.strategy), "threads (1, 4)"),
    }


@case(UNLIKE_THREADS, warning="saves no time among workers of one host")
def powersgd(world):
    compression = tfdist.CompressionConfig("powersgd", start_powerSGD_iter=0, matrix_approximation_rank=4)
    trainer = tfdist.Trainer(world.trainer.strategy, compression=compression)
    return trained(world, trainer, lambda: keras.optimizers.SGD(0.1))
