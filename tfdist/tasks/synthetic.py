"""A dense network of any size on random data, for benchmarks and byte counts. The labels are random: the loss does not fall."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tfdist.config.constraints import between, option
from tfdist.tasks.base import Task

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

_MOST = 10**9
_SIZE = between(1, _MOST)


@dataclasses.dataclass
class Options:
    """Size of the model and the data. By default the model has 10.5 million parameters.

    Attributes:
        features: Input size.
        width: Units of each hidden layer.
        layers: Number of hidden layers.
        classes: Output size.
        examples: Number of training examples.
    """

    features: int = option(1024, *_SIZE)
    width: int = option(2048, *_SIZE)
    layers: int = option(3, *between(0, _MOST))
    classes: int = option(10, *_SIZE)
    examples: int = option(4096, *_SIZE)


class Synthetic(Task):
    """A multi-layer perceptron on random examples."""

    Options = Options

    def build_model(self) -> keras.Model:
        import keras

        hidden = [keras.layers.Dense(self.options.width, activation="relu") for _ in range(self.options.layers)]
        return keras.Sequential(
            [keras.Input((self.options.features,)), *hidden, keras.layers.Dense(self.options.classes)], name="synthetic"
        )

    def compile_arguments(self) -> dict[str, Any]:
        import keras

        return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}

    def steps_per_epoch(self, global_batch_size: int) -> int:
        return self.options.examples // global_batch_size

    def train_data(self, context: tf.distribute.InputContext, global_batch_size: int, seed: int) -> tf.data.Dataset:
        import numpy as np

        from tfdist import data

        rng = np.random.default_rng(seed)
        x = rng.standard_normal((self.options.examples, self.options.features), np.float32)
        y = rng.integers(0, self.options.classes, self.options.examples, np.int32)
        return data.epochs((x, y), context, global_batch_size, seed)
