"""Handwritten digits: 1797 real 8x8 images with 17 grey levels, in 10 classes.

1437 images train and 360 validate, a fixed split. They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin
and C. Kaynak (UCI Machine Learning Repository, 1998, CC BY 4.0), which scikit-learn also contains.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import TYPE_CHECKING, Any

from tfdist.config.constraints import Constraint, between, option
from tfdist.tasks.base import Task

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

TRAIN_EXAMPLES = 1437
_MOST_FILTERS = 100_000  # the model's size grows with the square
_SHARE: Constraint = ("0 or more and below 1", lambda share: 0 <= share < 1)


@dataclasses.dataclass
class Options:
    """Size of the model.

    Attributes:
        filters: Channels of the first convolution; the second has twice as many.
        dropout: Share of the features dropped before the last layer, 0 to below 1.
        label_smoothing: Share of a label that is spread over all classes, 0 to below 1.
    """

    filters: int = option(32, *between(1, _MOST_FILTERS))
    dropout: float = option(0.3, *_SHARE)
    label_smoothing: float = option(0.0, *_SHARE)


class Digits(Task):
    """A small convolutional network with BatchNorm and Dropout on the digits."""

    Options = Options

    def build_model(self) -> keras.Model:
        import keras

        layers: list[Any] = [keras.Input((8, 8, 1))]
        for filters in (self.options.filters, 2 * self.options.filters):
            layers += [
                keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.ReLU(),
                keras.layers.MaxPooling2D(),
            ]
        layers += [keras.layers.Flatten(), keras.layers.Dropout(self.options.dropout), keras.layers.Dense(10)]
        return keras.Sequential(layers, name="digits")

    def compile_arguments(self) -> dict[str, Any]:
        import keras

        smoothing = self.options.label_smoothing
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if smoothing:
            loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing)
        return {"loss": loss, "metrics": ["accuracy"]}

    def steps_per_epoch(self, global_batch_size: int) -> int:
        return TRAIN_EXAMPLES // global_batch_size

    def train_data(self, context: tf.distribute.InputContext, global_batch_size: int, seed: int) -> tf.data.Dataset:
        from tfdist import data

        return data.epochs(self._examples(0), context, global_batch_size, seed)

    def eval_data(self, global_batch_size: int) -> tf.data.Dataset:
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(self._examples(1)).batch(global_batch_size)

    def _examples(self, split: int) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        images, labels = load()[split]
        if self.options.label_smoothing:
            labels = np.eye(10, dtype=np.float32)[labels]
        return images, labels


@functools.cache
def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns (train images, labels), (validation images, labels): `[n, 8, 8, 1]` float32 in 0 to 1, `[n]` int32."""
    import numpy as np

    with np.load(pathlib.Path(__file__).with_name("digits.npz")) as digits:
        images, labels = digits["images"], digits["labels"]
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order].reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    labels = labels[order].astype(np.int32)
    return (images[:TRAIN_EXAMPLES], labels[:TRAIN_EXAMPLES]), (images[TRAIN_EXAMPLES:], labels[TRAIN_EXAMPLES:])
