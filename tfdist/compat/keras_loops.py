"""Private names of Keras' loops over data (`fit`, `evaluate`, `predict`).

A release may move these names: tests/architecture/test_keras_internals.py then fails and names them. Only `tfdist/compat` and that test use
the constants that begin with `KERAS_`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import queue
import random
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import (
    concat,
    convert_to_np_if_not_ragged,
    potentially_ragged_concat,
    reduce_per_replica,
)
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer, PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
from keras.src.utils.python_utils import pythonify_logs

from tfdist.aliases import Function, Logs, Structure
from tfdist.compat import keras_losses, keras_metrics, tf_internals
from tfdist.errors import DataError

__all__ = [
    "ArrayDataAdapter",
    "DataAdapter",
    "GeneratorDataAdapter",
    "PyDatasetAdapter",
    "class_weight_to_sample_weights",
    "get_data_adapter",
    "make_class_weight_map_fn",
    "pythonify_logs",
    "train_validation_split",
]

DEFAULT_BATCH_SIZE = 32  # Keras' default for arrays
_RELEASE = tuple(map(int, keras.__version__.split(".")[:2]))
RESETS_METRICS_FOR_BATCH = _RELEASE >= (3, 15)  # whether `train_on_batch` and `test_on_batch` reset metrics
# Whether a loop without a number of steps warns when data of unknown size end.
WARNS_OF_UNKNOWN_END = _RELEASE < (3, 16)

Method = Function


# Data adapters

KERAS_SELF_FEEDING = ("PyDatasetAdapter", "GeneratorDataAdapter", "TorchDataLoaderAdapter", "GrainDatasetAdapter")
KERAS_ADAPTER_EPOCH = "_epoch"  # since Keras 3.16
KERAS_ADAPTER_ITERATOR = "_get_iterator"
KERAS_STANDARDIZE = "_standardize_batch"
KERAS_FIRST_BATCHES = "_first_batches"
_WATCH_SECONDS = 1.0  # between two looks at the worker processes of a PyDataset


def reads_python(adapter: DataAdapter) -> bool:
    """Returns whether a data adapter reads its data from Python code, which cannot restart."""
    return type(adapter).__name__ in KERAS_SELF_FEEDING


def skip_epochs(adapter: DataAdapter, number: int) -> None:
    """Makes a data adapter begin with a later epoch; since Keras 3.16 the shuffle of a PyDataset depends on the epoch's number."""
    if hasattr(adapter, KERAS_ADAPTER_EPOCH):
        setattr(adapter, KERAS_ADAPTER_EPOCH, getattr(adapter, KERAS_ADAPTER_EPOCH) + number)


def adapted_dataset(adapter: DataAdapter) -> tf.data.Dataset:
    """Returns the dataset of a data adapter.

    Each pass over a PyDataset starts new workers. Keras shares its workers between passes, and stops them at the end of an epoch: a thread
    that reads ahead, as a strategy's does, would lose batches.
    """
    if getattr(adapter, "enqueuer", None) is None:
        return adapter.get_tf_dataset()
    setattr(adapter, KERAS_ADAPTER_ITERATOR, functools.partial(_read_by_workers, adapter))
    dataset = adapter.get_tf_dataset()
    adapter.enqueuer = None
    return dataset


def generator_adapter(read: Callable[[], Iterator[Structure]]) -> GeneratorDataAdapter:
    """Returns the data adapter of a generator of batches. Raises Keras' ValueError without a batch or without tuples.

    `read` returns the batches of a pass; the adapter reads the first ones at once. A pass after the generator's end yields its first batches
    again, as Keras' adapter does.
    """

    def present(batch: Structure) -> Structure:
        # TensorFlow cannot split an absent sample_weight over replicas.
        if isinstance(batch, tuple) and batch[-1] is None:
            return batch[:-1]
        return batch

    def batches() -> Iterator[Structure]:
        remaining = map(present, read())
        begin = list(itertools.islice(remaining, 1))
        yield from begin or first
        yield from remaining

    adapter = GeneratorDataAdapter(map(present, read()))
    first = getattr(adapter, KERAS_FIRST_BATCHES)
    adapter.generator = batches
    return adapter


def dataset_reading(adapter: DataAdapter, batches: Function) -> tf.data.Dataset:
    """Returns the dataset of an adapter of a PyDataset or a generator, whose passes read `batches()` in place of the adapter's data."""
    if isinstance(adapter, PyDatasetAdapter):
        adapter.enqueuer = None
        setattr(adapter, KERAS_ADAPTER_ITERATOR, batches)
    else:
        adapter.generator = batches
    return adapter.get_tf_dataset()


def shuffle_items(adapter: PyDatasetAdapter) -> list[int]:
    """Returns the order in which Keras would read the items of a PyDataset in a new pass."""
    order = list(range(adapter.num_batches))
    epoch = getattr(adapter, KERAS_ADAPTER_EPOCH, None)
    if epoch is None:
        random.shuffle(order)
    else:
        random.Random(epoch).shuffle(order)
    return order


def read_items(adapter: PyDatasetAdapter, items: keras.utils.PyDataset, order: Iterable[int]) -> Iterator[Structure]:
    """Yields items of an endless PyDataset as batches, in an order that does not depend on its workers; the adapter standardizes them."""
    standardize = getattr(adapter, KERAS_STANDARDIZE)
    least = 1 if items.use_multiprocessing else 2  # Keras reads in the caller's thread with fewer workers
    if items.workers < least:
        yield from (standardize(items[index]) for index in order)
        return
    enqueuer = _enqueuer(items, shuffle=False)
    # The items are endless: `counted` ends the loop, after the items that the enqueuer reads ahead in the same order.
    counted, enqueuer.indices = itertools.tee(order)
    if _RELEASE >= (3, 16):
        enqueuer.start(0)
    else:
        enqueuer.start()
    with _stopping(enqueuer):
        yield from (standardize(item) for _, item in zip(counted, enqueuer.get(), strict=False))


def _read_by_workers(adapter: PyDatasetAdapter) -> Iterator[Structure]:
    pass_adapter = copy.copy(adapter)
    delattr(pass_adapter, KERAS_ADAPTER_ITERATOR)
    pass_adapter.enqueuer = _enqueuer(adapter.py_dataset, adapter.shuffle)
    with _stopping(pass_adapter.enqueuer):
        yield from getattr(pass_adapter, KERAS_ADAPTER_ITERATOR)()


def _enqueuer(data: keras.utils.PyDataset, shuffle: bool, name: str = "") -> OrderedEnqueuer:
    """Returns the workers of a pass over a PyDataset."""
    enqueuer = OrderedEnqueuer(data, data.workers, data.use_multiprocessing, data.max_queue_size, shuffle)
    if data.use_multiprocessing:
        create = enqueuer.executor_fn
        enqueuer.executor_fn = lambda items: _WatchedPool(create(items), name or type(data).__name__)
    return enqueuer


class _WatchedPool:
    """A pool of processes whose results raise a DataError once one of the processes has died: `multiprocessing.Pool` would wait forever."""

    def __init__(self, pool: Any, name: str):
        self._pool = pool
        self._name = name
        self._processes = list(pool._pool)  # the pool replaces a process that dies, but its item is lost
        self.close = pool.close

    def apply_async(self, function: Function, arguments: tuple[Any, ...]) -> types.SimpleNamespace:
        result = self._pool.apply_async(function, arguments)
        return types.SimpleNamespace(get=functools.partial(self._get, result))

    def _get(self, result: Any) -> Structure:
        while not result.ready():
            result.wait(_WATCH_SECONDS)
            # The processes of a closed pool end only after the last result.
            codes = [process.exitcode for process in self._processes if process.exitcode is not None]
            if codes and not result.ready():
                # `Pool.terminate` would wait for a lock that the process may have held.
                self._pool._terminate.cancel()
                self._pool._worker_handler._state = "TERMINATE"  # it starts no further process
                for process in [*self._pool._pool]:
                    process.kill()
                raise DataError(
                    f"a worker process of the PyDataset {self._name} has ended with exit code {codes[0]} before its item was ready; a negative "
                    "code is the signal that killed it, -9 perhaps for lack of memory: use fewer workers, or smaller items."
                )
        return result.get()


@contextlib.contextmanager
def _stopping(enqueuer: OrderedEnqueuer) -> Iterator[None]:
    """Stops the workers of a PyDataset at the end of the context."""
    try:
        yield
    finally:
        thread = enqueuer.run_thread
        enqueuer.stop(drain_queue_and_join=False)
        while thread is not None and thread.is_alive():  # the thread may wait for space in the queue
            with contextlib.suppress(queue.Empty):
                enqueuer.future_queue.get(timeout=0.01)


# Models

KERAS_BUILD_BY_CALL = "_symbolic_build"
KERAS_COMPUTE_LOSS = "_compute_loss"


def build_by_call(model: keras.Model, batch: Structure) -> None:
    """Builds a model, its metrics and its compiled optimizer by calling the model on the shapes of a batch.

    Raises:
        ValueError: The batch does not fit the model. Before Keras 3.14 Keras raises a RuntimeError with this error as its context.
    """
    build = getattr(model, KERAS_BUILD_BY_CALL)
    try:
        try:
            build(data_batch=batch)
        except Exception:
            if not model.run_eagerly:
                raise
            with _only_building(model):  # a metric or a loss may compute with NumPy, which needs values
                build(data_batch=batch)
    except RuntimeError as e:
        if isinstance(e.__context__, ValueError):
            raise e.__context__ from e.__context__.__cause__
        raise


@contextlib.contextmanager
def _only_building(model: keras.Model) -> Iterator[None]:
    """Makes a model build its compiled losses and metrics where Keras would compute them on the shapes of a batch."""

    def build_metrics(x: Structure, y: Structure, y_pred: Structure, sample_weight: Structure = None) -> Any:
        return keras_metrics.compiled_metrics(model).build(y, y_pred)

    def build_losses(x: Structure, y: Structure, y_pred: Structure, **_: Any) -> Any:
        return keras_losses.compiled_loss(model).build(y, y_pred)

    builders: dict[str, Function] = {"compute_metrics": build_metrics, KERAS_COMPUTE_LOSS: build_losses}
    before = {name: vars(model)[name] for name in builders if name in vars(model)}
    for name, builder in builders.items():
        setattr(model, name, builder)
    try:
        yield
    finally:
        for name in builders:
            delattr(model, name)
        for name, own in before.items():
            setattr(model, name, own)


def metrics_or_logs(model: keras.Model, logs: Logs) -> Logs:
    """Returns an epoch's logs: the results of the model's metrics, or `logs` of the last step, if their names differ."""
    results = model.get_metrics_result()
    if isinstance(logs, dict) and logs.keys() == results.keys():
        return results
    return logs


def check_compiled(model: keras.Model) -> None:
    """Raises ValueError if a model is not compiled, as Keras does."""
    if not model.compiled:
        raise ValueError("You must call `compile()` before using the model.")


def flat_logs(model: keras.Model, logs: dict[str, Any]) -> Logs:
    """Returns logs as `evaluate` does without `return_dict`: a number, or a list in the order of the model's metrics."""
    compiled = keras_metrics.compiled_metrics(model)
    names: list[str] = []
    for metric in model.metrics:
        if metric is compiled:
            names += [each.name for each in metric.metrics]
        else:
            names.append(metric.name)
    values = [logs[name] for name in names if name in logs]
    values += [logs[name] for name in sorted(logs) if name not in names]
    return values[0] if len(values) == 1 else values


# Outputs of `predict`


def concatenate(*parts: Structure) -> Structure:
    """Returns the concatenated outputs of several batches: dense, ragged or sparse tensors."""
    return concat(list(parts))


def joined_outputs(parts: Sequence[Structure]) -> Structure:
    """Returns the concatenated outputs of a prediction's executions, as NumPy arrays unless they are ragged."""
    tree = keras.tree
    lists = tree.map_structure_up_to(parts[0], lambda *outputs: list(outputs), *parts)
    return as_arrays(tree.map_structure_up_to(parts[0], potentially_ragged_concat, lists))


def as_arrays(outputs: Structure) -> Structure:
    """Returns outputs as NumPy arrays unless they are ragged."""
    return keras.tree.map_structure(convert_to_np_if_not_ragged, outputs)


def concatenate_replicas(outputs: Structure, strategy: tf.distribute.Strategy, several_processes: bool) -> Structure:
    """Returns the concatenated outputs of all replicas of all workers, in the replicas' order. A collective."""
    if several_processes and tf_internals.num_replicas(strategy) > 1:  # Keras would order by local replica
        return tf.nest.map_structure(lambda values: _gather(values, strategy), outputs)
    return reduce_per_replica(outputs, strategy, reduction="concat")


def _gather(values: Structure, strategy: tf.distribute.Strategy) -> tf.Tensor:
    if strategy.experimental_local_results(values)[0].dtype != tf.string:
        return strategy.gather(values, axis=0)
    longest = strategy.run(_longest, args=(values,))
    length = tf.reduce_max(strategy.gather(longest, axis=0))
    return _decoded(strategy.gather(strategy.run(_encoded, args=(values, length)), axis=0))


def _longest(texts: tf.Tensor) -> tf.Tensor:
    return tf.reduce_max(tf.concat([tf.reshape(tf.strings.length(texts), [-1]), [1]], 0), keepdims=True)


def _encoded(texts: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    """Returns the length and the bytes of each text as numbers of a dtype that all collectives support."""
    codes = tf.io.decode_raw(texts, tf.uint8, fixed_length=length)
    return tf.cast(tf.concat([tf.strings.length(texts)[..., tf.newaxis], tf.cast(codes, tf.int32)], -1), tf.float32)


def _decoded(encoded: tf.Tensor) -> tf.Tensor:
    """Returns the texts that `_encoded` has encoded."""
    lengths, codes = tf.split(tf.cast(encoded, tf.int32), [1, tf.shape(encoded)[-1] - 1], -1)
    letters = tf.gather(tf.constant([bytes([code]) for code in range(256)]), codes)
    return tf.strings.substr(tf.strings.reduce_join(letters, -1), tf.zeros_like(lengths[..., 0]), lengths[..., 0])
