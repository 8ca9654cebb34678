"""A dense network of any size on random data, for benchmarks and byte counts. The labels are random: the loss does not fall."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfdist.errors import format_value
from tfdist.tasks.base import Task

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

_MOST = 10**9


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

    features: int = 1024
    width: int = 2048
    layers: int = 3
    classes: int = 10
    examples: int = 4096

    def faults(self) -> Iterator[str]:
        """Yields the errors in the options."""
        for field in dataclasses.fields(self):
            least = 0 if field.name == "layers" else 1
            if not least <= (value := getattr(self, field.name)) <= _MOST:
                yield f"task_options.{field.name} must be {least} to {_MOST}. Received: {format_value(value)}."


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
