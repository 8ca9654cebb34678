"""The arguments of `fit`, `evaluate` and `predict`: data in a form that Keras distributes, the others by name."""

from __future__ import annotations

import collections.abc
import inspect
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras_loops import DEFAULT_BATCH_SIZE, GeneratorDataAdapter, make_class_weight_map_fn
from tfdist.data import arrays
from tfdist.engine import Engine

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
        return from_generator(data)
    if not is_function(data):
        return data

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        batches = data(context)
        return batches.map(make_class_weight_map_fn(class_weight)) if class_weight else batches

    return engine.distribute(dataset)


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


def is_function(data: Any) -> bool:
    """Whether data are a function of an input context."""
    return callable(data) and not isinstance(data, (tf.data.Dataset, keras.utils.PyDataset))


def batch_size(data: Any, arguments: dict[str, Any]) -> int | None:
    """Returns the global batch size of `fit`, or None if it is unknown before the first step."""
    if isinstance(data, tf.data.Dataset):
        return arrays.batch_size(data)
    if is_function(data) or isinstance(data, (keras.utils.PyDataset, collections.abc.Iterator)):
        return None
    return arguments.get("batch_size") or DEFAULT_BATCH_SIZE


def ends_within_execution(model: keras.Model, steps: int | None) -> bool:
    """Whether the last of `steps` steps ends amid an execution."""
    return bool(steps and steps % model.steps_per_execution)


def bind_arguments(
    keras_own: Callable[..., Any], method: Callable[..., Any], model: Any, args: Any, kwargs: Any
) -> dict[str, Any]:
    """Returns the arguments by name.

    Args:
        keras_own: Keras' method.
        method: It, or the method of the model's class, which may override it with more arguments.
        model: The model.
        args: By place.
        kwargs: By name.
    """
    signature = inspect.signature(method)
    _, *others = signature.bind(model, *args, **kwargs).arguments.items()
    arguments: dict[str, Any] = {}
    for name, value in others:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:  # which it passes on to Keras
            remaining = [each for each in list(inspect.signature(keras_own).parameters)[1:] if each not in arguments]
            arguments |= zip(remaining, value, strict=False)
        else:
            arguments |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return arguments


def data_argument(method: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Returns the name by which a model's method takes its data: x, or, where it has no x, its first argument's."""
    names = list(inspect.signature(method).parameters)[1:]
    return "x" if "x" in (*arguments, *names) else names[0]


def takes(method: Callable[..., Any], name: str) -> bool:
    """Whether a method takes an argument of that name."""
    parameters = inspect.signature(method).parameters
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def as_list(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns callbacks as a list, however they were given."""
    listed = getattr(callbacks, "callbacks", callbacks)  # a keras CallbackList
    return [listed] if isinstance(listed, keras.callbacks.Callback) else list(listed or [])
