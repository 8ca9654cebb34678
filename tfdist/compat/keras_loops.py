"""What tfdist uses of Keras' loops over data (`fit`, `evaluate`, `predict`) beyond their public interfaces.

A release may move these names: tests/architecture/test_keras_internals.py says which. Only `tfdist/compat` and that test use
the constants that begin with `KERAS_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator, concat, reduce_per_replica
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
from keras.src.utils.python_utils import pythonify_logs

__all__ = [
    "ArrayDataAdapter",
    "GeneratorDataAdapter",
    "PyDatasetAdapter",
    "make_class_weight_map_fn",
    "pythonify_logs",
]

DEFAULT_BATCH_SIZE = 32  # Keras' own, of arrays for which none is given

Method = Callable[..., Any]


# The loop's data

KERAS_ADAPTER = "data_adapter"
KERAS_SELF_FEEDING = ("PyDatasetAdapter", "GeneratorDataAdapter", "TorchDataLoaderAdapter", "GrainDatasetAdapter")
KERAS_DATA = "_distributed_dataset"
KERAS_ADAPTER_DATA = "_dataset"
KERAS_NUM_BATCHES = "_num_batches"
KERAS_ADAPTER_EPOCH = "_epoch"  # since Keras 3.16


def is_loop(value: Any) -> bool:
    """Whether an object is a Keras loop over data (an EpochIterator)."""
    return hasattr(value, KERAS_ADAPTER)


def adapter_name(value: Any) -> str:
    """Returns the class name of a loop's data adapter; of any other object, its own class name."""
    return type(getattr(value, KERAS_ADAPTER, value)).__name__


def reads_python(value: Any) -> bool:
    """Whether a loop, or a data adapter, takes its data from Python code, which cannot begin again."""
    return adapter_name(value) in KERAS_SELF_FEEDING


def skip_epochs(adapter: Any, number: int) -> None:
    """Makes a data adapter begin with a later epoch; since Keras 3.16 it shuffles a PyDataset by the epoch's number."""
    if hasattr(adapter, KERAS_ADAPTER_EPOCH):
        setattr(adapter, KERAS_ADAPTER_EPOCH, getattr(adapter, KERAS_ADAPTER_EPOCH) + number)


def distributed_dataset(loop: Any) -> Any:
    """Returns the dataset that a strategy has made for a loop, or None."""
    return getattr(loop, KERAS_DATA, None)


def count_steps_of(loop: Any, distributed: Any) -> None:
    """Makes a loop over a dataset take the number of its steps from what a strategy has made of the dataset."""
    adapter = getattr(loop, KERAS_ADAPTER)
    setattr(adapter, KERAS_ADAPTER_DATA, distributed)
    setattr(loop, KERAS_NUM_BATCHES, adapter.num_batches)


# How a model is built before its first step

KERAS_BUILD = "_maybe_symbolic_build"
KERAS_BUILD_BY_CALL = "_symbolic_build"


def make_loop(strategy: tf.distribute.Strategy, **arguments: Any) -> Any:
    """Returns a loop over data, as `fit` makes it.

    Args:
        strategy: That of the model.
        **arguments: Those of `fit` about the data.
    """
    return TFEpochIterator(distribute_strategy=strategy, **arguments)


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that `set_initial_epoch` has set."""
    return getattr(model, KERAS_INITIAL_EPOCH, None)


def build_method(model: keras.Model) -> Method:
    """Returns the method that builds a model before its first step, for a loop (`iterator`) or a batch (`data_batch`)."""
    method: Method = getattr(model, KERAS_BUILD)
    return method


def has_replaced_build(model: keras.Model) -> bool:
    """Whether `replace_build` was called for a model."""
    return KERAS_BUILD in vars(model)


def replace_build(model: keras.Model, new: Method) -> None:
    """Replaces the method that builds a model before its first step."""
    setattr(model, KERAS_BUILD, new)


def build_by_call(model: keras.Model, batch: Any) -> None:
    """Builds a model, its metrics and its compiled optimizer by calling the model on the shapes of a batch."""
    getattr(model, KERAS_BUILD_BY_CALL)(data_batch=batch)


# Logs, epochs and steps

KERAS_LOGS = "_get_metrics_result_or_logs"
KERAS_INITIAL_EPOCH = "_initial_epoch"
KERAS_ENUMERATE = "_enumerate_iterator"
KERAS_GET_ITERATOR = "_get_iterator"
KERAS_ITERATORS = ("_current_iterator", "_epoch_iterator")
KERAS_STEPS_SEEN = "_steps_seen"


def logs_method(model: keras.Model) -> Method:
    """Returns the method that makes an epoch's logs from those of its last step."""
    method: Method = getattr(model, KERAS_LOGS)
    return method


def has_replaced_logs(model: keras.Model) -> bool:
    """Whether `replace_logs` was called for a model."""
    return KERAS_LOGS in vars(model)


def replace_logs(model: keras.Model, new: Method) -> None:
    """Replaces the method of `logs_method`."""
    setattr(model, KERAS_LOGS, new)


def metrics_or_logs(model: keras.Model, logs: Any) -> Any:
    """Returns an epoch's logs as the model's class makes them, whatever `replace_logs` has set."""
    return getattr(type(model), KERAS_LOGS)(model, logs)


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the epoch with which `fit` begins, from 0; None leaves it to `fit`'s argument."""
    setattr(model, KERAS_INITIAL_EPOCH, epoch)


def replace_enumeration(loop: Any, enumerate_steps: Method, get_iterator: Method) -> None:
    """Replaces the methods with which a loop enumerates the steps of an epoch, and gets its data for a pass."""
    setattr(loop, KERAS_ENUMERATE, enumerate_steps)
    setattr(loop, KERAS_GET_ITERATOR, get_iterator)


def enumerate_steps(loop: Any) -> Iterator[Any]:
    """Yields (first step, last step, iterator) for each execution of an epoch, as the loop's class does."""
    steps: Iterator[Any] = getattr(type(loop), KERAS_ENUMERATE)(loop)
    return steps


def pass_data(loop: Any) -> Any:
    """Returns the data of a pass, as the loop's class does."""
    return getattr(type(loop), KERAS_GET_ITERATOR)(loop)


def drop_iterator(loop: Any) -> None:
    """Makes a loop forget the iterator of its last pass, which might otherwise read ahead."""
    setattr(loop, KERAS_ITERATORS[0], None)


def drop_iterators(loop: Any) -> None:
    """Makes a loop that has ended, perhaps by an error, forget what it reads from: it might read ahead and draw for ever."""
    for name in KERAS_ITERATORS:
        setattr(loop, name, None)


def is_pass_over(loop: Any, steps: int) -> bool:
    """Whether a pass over a loop's data has no further steps after so many; False if their number is not known."""
    batches = getattr(loop, KERAS_ADAPTER).num_batches
    return batches is not None and steps >= batches


def add_steps_seen(loop: Any, steps: int) -> None:
    """Adds to the number of steps that a loop has done in its pass."""
    setattr(loop, KERAS_STEPS_SEEN, getattr(loop, KERAS_STEPS_SEEN) + steps)


# What `predict` makes of its outputs


def concatenate(*parts: Any) -> Any:
    """Returns the outputs of several batches as of one: dense, ragged or sparse tensors."""
    return concat(list(parts))


def concatenate_replicas(outputs: Any, strategy: tf.distribute.Strategy) -> Any:
    """Returns the outputs of all replicas, of all workers, as of one. A collective."""
    return reduce_per_replica(outputs, strategy, reduction="concat")
