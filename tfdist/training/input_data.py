"""The data of `fit`, `evaluate` and `predict`, in a form that Keras distributes over the replicas."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.keras_loops import make_class_weight_map_fn
from tfdist.data import generator
from tfdist.engine import Engine
from tfdist.training import arguments

DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]


def distribute(
    data: Any,
    engine: Engine,
    class_weight: dict[int, float] | None = None,
) -> Any:
    """Returns data that Keras' loops take under an engine.

    Args:
        data: What the user gave: a generator, a `DatasetFunction`, or anything else, which is returned as it is.
        engine: Trains on them.
        class_weight: The weight of each class, applied to the data of a function; Keras applies it to other data.
    """
    if isinstance(data, types.GeneratorType):
        return generator.from_generator(data)
    if not arguments.is_function(data):
        return data

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        batches = data(context)
        return batches.map(make_class_weight_map_fn(class_weight)) if class_weight else batches

    return engine.distribute(dataset)
