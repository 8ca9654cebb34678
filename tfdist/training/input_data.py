"""The arguments of `fit`, `evaluate` and `predict`: data become the source of a loop, other arguments are bound by name."""

from __future__ import annotations

import collections.abc
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Callbacks, Data, DataIterator, Function, Structure
from tfdist.collectives.ranks import Ranks
from tfdist.compat import keras_loops, tf_internals, unsupported
from tfdist.compat.keras_loops import DEFAULT_BATCH_SIZE
from tfdist.data import arrays, python_items
from tfdist.data.generator_batches import GeneratorBatches, GeneratorReading, batches_of
from tfdist.data.python_items import GeneratorItems
from tfdist.data.source import DataSource, limited_steps
from tfdist.data.stored import StoredData
from tfdist.data.worker_rows import OwnRows
from tfdist.engine import Engine
from tfdist.errors import ConfigError, format_value
from tfdist.replicas import batch_splitting
from tfdist.replicas.own_batches import split_among_replicas
from tfdist.training.python_source import open_python_source

DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]
_LEAST = {
    **dict.fromkeys(("epochs", "initial_epoch"), 0),
    **dict.fromkeys(("batch_size", "steps", "steps_per_epoch", "validation_batch_size", "validation_steps"), 1),
}
_NEEDED = ("epochs", "initial_epoch")  # Keras does not take None for them


def open_source(
    engine: Engine,
    data: tuple[Any, Any, Any],
    batch_size: int | None,
    steps: int | None,
    shuffle: bool | str = False,
    class_weight: Mapping[int, float] | None = None,
    per_execution: int = 1,
    initial_epoch: int | None = None,
) -> DataSource:
    """Returns the source of a loop over `(x, y, sample_weight)`; `x` may be a `DatasetFunction` or `StoredData`.

    `initial_epoch` is the first epoch of a training; None means that the loop passes over the data once, in order.
    """
    x, y, sample_weight = data
    unsupported.check_data(engine.strategy, x)
    beside = {"y": y, "sample_weight": sample_weight, "class_weight": class_weight}
    items = x
    x = python_items.unwrapped(items)
    # With these arguments Keras raises an error.
    if isinstance(x, (types.GeneratorType, keras.utils.PyDataset)) and all(
        value is None or (name == "class_weight" and isinstance(x, keras.utils.PyDataset))
        for name, value in beside.items()
    ):
        if engine.ranks and engine.ranks.size > 1:
            return open_python_source(engine, items, bool(shuffle), per_execution, class_weight)
        if isinstance(x, types.GeneratorType):
            return _generator_source(engine, x)
    if isinstance(x, StoredData):
        present = [name for name in ("y", "sample_weight") if beside[name] is not None]
        if present:
            raise ConfigError(
                f"{x.source.origin} holds targets and weights. Received {present[0]} beside it: put it into its batches."
            )
        if class_weight:
            x = x.mapped(keras_loops.make_class_weight_map_fn(class_weight))
        if initial_epoch is None or not shuffle:
            x = x.in_order()
        if initial_epoch is None:
            return engine.source_from_stored(x, 0, x.steps_per_epoch)
        # The order is a function of the epoch: a training that begins at a later epoch begins at that epoch's first step.
        start = initial_epoch * (limited_steps(steps or x.steps_per_epoch) or 0)
        return engine.source_from_stored(x, start, None)
    if is_function(x):

        def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
            batches = x(context)
            if not isinstance(batches, tf.data.Dataset):
                raise ConfigError(
                    f"A dataset function must return a tf.data.Dataset. Received: {type(batches).__name__}."
                )
            if class_weight:
                batches = batches.map(keras_loops.make_class_weight_map_fn(class_weight))
            return batches

        return engine.source_from_function(make)
    adapter = keras_loops.get_data_adapter(
        x=x,
        batch_size=batch_size,
        steps_per_epoch=limited_steps(steps),
        shuffle=shuffle,
        **beside,
    )
    unsupported.check_data(engine.strategy, adapter)
    dataset = keras_loops.adapted_dataset(adapter)
    if isinstance(adapter, keras_loops.ArrayDataAdapter):
        dataset = tf_internals.without_autotuning(dataset)  # it only slices arrays: autotuning gains nothing
        dataset = dataset.apply(
            tf.data.experimental.assert_cardinality(adapter.num_batches)
        )  # which TensorFlow does not know
    source = engine.source(dataset, adapter.num_batches)
    source.adapter = adapter
    return source


def _generator_source(engine: Engine, generator: types.GeneratorType) -> DataSource:
    """Returns the source of a generator that one process reads."""
    reading = GeneratorReading(generator)
    adapter = keras_loops.generator_adapter(reading.batches)
    unsupported.check_data(engine.strategy, adapter)
    source = engine.source(adapter.get_tf_dataset(), adapter.num_batches)
    source.adapter = adapter
    source.generator = reading
    return source


def generator_batches(data: Data) -> GeneratorBatches | None:
    """Returns the batches of data that are a generator, or the result of `from_generator`; None for other data."""
    generator = python_items.unwrapped(data)
    if not isinstance(generator, types.GeneratorType):
        return None
    return batches_of(generator)


def unpack_own_rows(data: Data, arguments: dict[str, Any]) -> Data:
    """Returns the inputs of `own_rows` and adds its targets and weights to `arguments`: in one process they are plain arrays."""
    if not isinstance(data, OwnRows):
        return data
    if data.y is not None:
        arguments["y"] = data.y
    if data.sample_weight is not None:
        arguments["sample_weight"] = data.sample_weight
    return data.x


def check_own_rows(data: Data, arguments: dict[str, Any]) -> None:
    """Raises ConfigError if there are targets, weights or a split beside `own_rows`."""
    if not isinstance(data, OwnRows):
        return
    conflicting = [name for name in ("y", "sample_weight") if arguments.get(name) is not None]
    if arguments.get("validation_split"):
        conflicting.append("validation_split")
    if conflicting:
        raise ConfigError(
            f"own_rows(x, y, sample_weight) holds targets and weights. Received {conflicting[0]} beside it: pass targets and weights to "
            "own_rows, and validation data as validation_data=own_rows(...)."
        )


def as_function(data: Data, batch_size: int | None, shuffle: bool | str = False) -> Data:
    """Returns the dataset function of `own_rows`; returns other data unchanged. A batch size of None means Keras' default."""
    if not isinstance(data, OwnRows):
        return data

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        local_size = -(-(batch_size or DEFAULT_BATCH_SIZE) // context.num_input_pipelines)
        return split_among_replicas(data.dataset(local_size, shuffle), context)

    return make


def order_by_worker(outputs: Structure, rows: list[list[int]], ranks: Ranks) -> Structure:
    """Returns the outputs for worker 0's own rows, then for worker 1's, and so on. A collective.

    `outputs` are ordered by step, then by worker, then by replica; `rows[step][replica]` counts this worker's rows.
    """
    local = np.asarray(rows, np.int64)
    gathered = ranks.gather(*local.ravel()).reshape(ranks.size, *local.shape)
    counts = gathered.transpose(1, 0, 2).astype(np.int64)  # [step, worker, replica], as the outputs are ordered
    workers = np.broadcast_to(np.arange(ranks.size)[:, np.newaxis], counts.shape)
    # A stable sort by worker keeps the order of each worker's outputs.
    order = np.argsort(np.repeat(workers.ravel(), counts.ravel()), kind="stable")

    def sort(values: Structure) -> Structure:
        if isinstance(values, np.ndarray):
            return values[order]
        return tf.gather(values, order)

    return tf.nest.map_structure(sort, outputs)


def is_function(data: Data) -> bool:
    """Returns whether data are a function of an input context."""
    return callable(data) and not isinstance(data, (tf.data.Dataset, keras.utils.PyDataset))


def batch_size(data: Data, arguments: dict[str, Any]) -> int | None:
    """Returns the global batch size of `fit`, or None if it is unknown before the first step."""
    if isinstance(data, tf.data.Dataset):
        return arrays.batch_size(data)
    if isinstance(data, StoredData):
        return data.batch_size
    if is_function(data) or isinstance(data, (keras.utils.PyDataset, GeneratorItems, collections.abc.Iterator)):
        return None
    return arguments.get("batch_size") or DEFAULT_BATCH_SIZE


def bind_arguments(method: Function, model: keras.Model, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a Keras method by name. Raises ConfigError for a wrong type or range, where Keras would raise later or not at all."""
    try:
        _, *others = inspect.signature(method).bind(model, *args, **kwargs).arguments.items()
    except TypeError:
        method(model, *args, **kwargs)  # raises an error that names the method
        raise
    arguments: dict[str, Any] = {}
    for name, value in others:
        if name == "kwargs":
            raise ValueError(f"Arguments not recognized: {value}")
        arguments[name] = value
    parameters = inspect.signature(method).parameters
    if "x" in parameters:
        faults = list(_argument_faults(arguments))
        steps = {"x": next((name for name in ("steps_per_epoch", "steps") if name in parameters), "x")}
        if "validation_data" in parameters:
            steps["validation_data"] = "validation_steps"
        faults += [
            f"{name} must be a dataset that ends, or {limit} must say how many of its batches to take."
            for name, limit in steps.items()
            if arguments.get(limit) is None and _is_endless(arguments.get(name))
        ]
        if faults:
            raise ConfigError(faults)
    return arguments


def _argument_faults(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields the errors in the arguments of Keras' own methods, except arrays that do not fit each other."""
    data = arguments.get("x")
    if data is None or (isinstance(data, (list, tuple, dict)) and not data):
        yield f"x must be data: arrays, a tf.data.Dataset, or a function that returns one. Received: {format_value(data)}."
    for name, least in _LEAST.items():
        value = arguments.get(name)
        if name in arguments and (value is not None or name in _NEEDED) and not _is_whole(value, least):
            yield f"{name} must be a whole number, {least} or more. Received: {format_value(value)}."
    freq = arguments.get("validation_freq", 1)
    if not isinstance(freq, collections.abc.Container) and not _is_whole(freq, 1):
        yield f"validation_freq must be a whole number, 1 or more, or a list of epochs. Received: {format_value(freq)}."
    split = arguments.get("validation_split")
    if split is not None and not (isinstance(split, (int, float, np.number)) and 0 <= split < 1):
        yield f"validation_split must be a number, 0 to less than 1. Received: {format_value(split)}."
    validation = arguments.get("validation_data")
    if isinstance(validation, (str, bytes, int, float)):
        yield f"validation_data must be arrays (x, y), a tf.data.Dataset, or a function. Received: {format_value(validation)}."
    weights = arguments.get("class_weight")
    if weights is None:
        weights = {}
    if not isinstance(weights, Mapping) or not all(isinstance(label, (int, float, np.number)) for label in weights):
        yield f"class_weight must be a dict of classes' numbers to weights, such as {{0: 1.0, 1: 2.5}}. Received: {format_value(weights)}."


def _is_endless(data: Any) -> bool:
    return isinstance(data, tf.data.Dataset) and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY


def _is_whole(value: Any, least: int) -> bool:
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def next_batch(iterator: DataIterator, strategy: tf.distribute.Strategy) -> Structure:
    """Returns the next batch of a pass, or None at its end."""
    try:
        batch = next(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return None
    if batch_splitting.is_over(batch, strategy):
        return None
    return batch


def as_list(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Returns callbacks as a list: from a CallbackList, an iterable, a single callback, or None."""
    listed = getattr(callbacks, "callbacks", callbacks) or ()  # a keras CallbackList has the attribute
    if isinstance(listed, keras.callbacks.Callback) or not isinstance(listed, collections.abc.Iterable):
        listed = [listed]
    callback_list = list(listed)
    for callback in callback_list:
        # Keras itself requires only a callback's methods, not its class.
        if isinstance(callback, type) or not hasattr(callback, "on_train_batch_begin"):
            raise ConfigError(
                f"callbacks must be objects of keras.callbacks.Callback. Received: {format_value(callback)}."
            )
    return callback_list
