"""A task that insists on being found before TensorFlow is loaded."""

import dataclasses
import sys

import tfdist

if "tensorflow" in sys.modules:
    raise ImportError("TensorFlow has been loaded before the task was looked up")


@dataclasses.dataclass
class Options:
    """Units of the model."""

    units: int = 4


class Little(tfdist.Task):
    """Whether two numbers are both positive."""

    Options = Options

    def build_model(self):
        import keras

        return keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(self.options.units, "relu"), keras.layers.Dense(1, "sigmoid")]
        )

    def compile_arguments(self):
        return {"loss": "binary_crossentropy"}

    def train_data(self, context, global_batch_size, seed):
        import numpy as np

        from tfdist import data

        x = np.random.default_rng(seed).uniform(-1, 1, (256, 2)).astype(np.float32)
        return data.epochs((x, (x > 0).all(axis=1).astype(np.float32)), context, global_batch_size, seed)

    def steps_per_epoch(self, global_batch_size):
        return 256 // global_batch_size
