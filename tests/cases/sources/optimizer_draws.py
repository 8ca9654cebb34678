"""An optimizer of the user draws random numbers in its update: all replicas draw the same ones, as one device would."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, ONE_DEVICE, TWO_EACH, WORKERS
from tests.cases.case import case

X = np.ones((16, 3), np.float32)
RATE, STEPS, SEED = 0.5, 4, 5


class Noisy(keras.optimizers.SGD):
    """Adds noise to each gradient."""

    def __init__(self, draw):
        super().__init__(RATE)
        self.draw = draw
        self.seed = keras.random.SeedGenerator(SEED)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient + self.draw(self, gradient.shape), variable, learning_rate)


def by_own_seed(optimizer, shape):
    return keras.random.normal(shape, seed=optimizer.seed)


def by_the_global_seed(optimizer, shape):
    return keras.random.normal(shape)


def by_tensorflow(optimizer, shape):
    return tf.random.normal(shape)


def trained(world, draw):
    """Returns the kernels of all replicas after a training whose gradient is 0."""
    keras.utils.set_random_seed(3)
    with world.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5)])
        model.add(keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros"))
        model.compile(Noisy(draw), "mse")
    model.fit(X, np.zeros((16, 2)), batch_size=4, sample_weight=np.zeros(16), verbose=0)
    strategy = model.distribute_strategy
    kernels = [np.array(copy) for copy in strategy.experimental_local_results(model.weights[-1].value)]
    return [kernel for rank in world.gather(kernels) for kernel in rank]


@case(ONE_DEVICE, MIRRORED, WORKERS, TWO_EACH, full=(ONE_DEVICE, WORKERS, TWO_EACH))
def an_update_draws_the_same_on_all_replicas(world):
    found = trained(world, by_own_seed)
    generator = keras.random.SeedGenerator(SEED)
    noise = sum(np.array(keras.random.normal((3, 2), seed=generator)) for _ in range(STEPS))
    pairs = {f"own seed, replica {number}": (kernel, -RATE * noise) for number, kernel in enumerate(found)}
    if world.replicas == 1:
        return pairs
    for draw in (by_the_global_seed, by_tensorflow):
        first, *others = trained(world, draw)
        pairs |= {f"{draw.__name__}, replica {n}": (other, first) for n, other in enumerate(others, 1)}
        assert np.std(first) > 0
    return pairs
