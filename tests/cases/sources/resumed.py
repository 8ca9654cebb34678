"""A training that an error has ended continues in the same process."""

import keras
import numpy as np

import tfdist
from tests.cases.arms import MIRRORED, TWO_EACH, WORKERS
from tests.cases.case import case

rng = np.random.default_rng(1)
X = rng.standard_normal((27, 4)).astype("float32")
Y = rng.standard_normal((27, 1)).astype("float32")


class Lost(Exception):
    pass


class Lose(keras.callbacks.Callback):
    """Raises after a step. A callback that acts on batches would change the moving statistics of the undisturbed training."""

    only_observes = True

    def __init__(self, step):
        super().__init__()
        self.remaining = step

    def on_train_batch_end(self, batch, logs=None):
        self.remaining -= 1
        if not self.remaining:
            raise Lost


def train(world, folder, callbacks=()):
    """Returns the bits of each replica's variables after two epochs of four steps, with backups after steps 3 and 6."""
    keras.utils.set_random_seed(1)
    with world.scope():
        layers = [
            keras.layers.Dense(5, name="dense"),
            keras.layers.BatchNormalization(momentum=0.9, name="normalization"),
        ]
        model = keras.Sequential(
            [keras.Input((4,), name="input"), *layers, keras.layers.Dense(1, name="output")], name="model"
        )
        model.compile(keras.optimizers.Adam(0.1, gradient_accumulation_steps=4, name="adam"), "mse")
    backup = tfdist.BackupAndRestore(world.folder / folder, save_freq=3)
    world.trainer.fit(model, X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[*callbacks, backup])
    local = world.trainer.strategy.experimental_local_results
    variables = [*model.variables, *model.optimizer.variables]
    return {v.path: [own.numpy().tobytes().hex() for own in local(v.value)] for v in variables}


@case(WORKERS, MIRRORED, TWO_EACH, full=(WORKERS, TWO_EACH))
def to_the_bit_in_the_same_process(world):
    undisturbed = train(world, "undisturbed")
    try:
        train(world, "lost", [Lose(7)])
    except Lost:
        pass
    else:
        raise AssertionError("the callback has not ended the training")
    return {"variables": (train(world, "lost"), undisturbed)}
