"""A dataset of what a Python generator yields."""

from __future__ import annotations

import types
from typing import Any

import tensorflow as tf

from tfdist.compat.keras_loops import GeneratorDataAdapter


def from_generator(generator: types.GeneratorType) -> tf.data.Dataset:
    """Makes a dataset of what a Python generator yields.

    Args:
        generator: Yields batches, as `fit` takes them.

    Raises:
        ValueError: As Keras: the generator is empty, or yields no tuples.
    """

    def present(batch: Any) -> Any:  # TensorFlow cannot split an absent sample_weight over replicas
        return batch[:-1] if isinstance(batch, tuple) and batch[-1] is None else batch

    return GeneratorDataAdapter(map(present, generator)).get_tf_dataset()
