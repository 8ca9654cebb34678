"""Checks the arguments of a `Trainer` and of its methods, among them those that must be equal on all workers."""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Data, Structure
from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.collectives.ranks import Ranks
from tfdist.compat import unsupported
from tfdist.config import StrategyConfig, validation
from tfdist.data import graph, worker_rows
from tfdist.data.stored import StoredData
from tfdist.errors import ConfigError, unknown_name_message
from tfdist.strategy import Strategy, as_ours
from tfdist.training import array_digest, program_likeness
from tfdist.training.callback_kinds import place_attribute

_COMPARED_NUMBERS = (
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "batch_size",
    "validation_steps",
    "validation_batch_size",
)
_NO_NUMBER = -1.0
_MOST_TRANSFORMATIONS = 32  # transformations of a dataset that are compared one by one
_TEXT_LENGTH = 200  # bytes of a transformation's text in a message


def check_strategy(strategy: tf.distribute.Strategy, options: Collection[str]) -> None:
    """Raises ConfigError unless `tfdist.create_strategy` has made the strategy and `options` is empty.

    Options are only valid if the strategy is given as a name or a StrategyConfig.
    """
    if as_ours(strategy) is None or options:
        raise ConfigError(
            "strategy must be a name, a StrategyConfig, or a strategy made by tfdist.create_strategy; options are "
            f"only valid with a name or a StrategyConfig. Received: {type(strategy).__name__}, options {sorted(options)}."
        )


def check_options(trainer: type, strategy: object, options: Collection[str]) -> None:
    """Raises ConfigError for each option that is not a field of StrategyConfig, if `strategy` is a name or None."""
    fields = {field.name for field in dataclasses.fields(StrategyConfig)} - {"name"}
    known = fields | {*inspect.signature(trainer).parameters} - {"options"}
    faults = [unknown_name_message("argument of Trainer", name, known) for name in options if name not in fields]
    if faults and (strategy is None or isinstance(strategy, str)):
        raise ConfigError(faults)


def check_nan_policy(policy: str, strategy: Strategy) -> None:
    """Raises ConfigError if the policy is unknown or the strategy does not support it."""
    if faults := list(validation.nan_policy_faults(policy, strategy.kind, strategy.traits)):
        raise ConfigError(faults)


def check_trains_alone(cluster_and_task: tuple[ClusterSpec, TaskSpec] | None, strategy: str) -> None:
    """Raises ConfigError if a single-process strategy is used in a cluster of several training tasks.

    Each task would train the whole model and overwrite the files of the others.
    """
    if cluster_and_task is None:
        return
    cluster, task = cluster_and_task
    if task.type != "evaluator" and len(cluster.training_tasks()) > 1:
        raise ConfigError(
            f"{strategy} trains in one process, but this one is {task} of {len(cluster.training_tasks())} training "
            "tasks; use strategy multi_worker_mirrored, or, for independent training runs, cluster=False "
            "(--config.cluster.source=none)."
        )


def check_model(model: keras.Model, strategy: tf.distribute.Strategy, method: str) -> None:
    """Raises ConfigError if `model`, the first argument of the trainer's `method`, is not a model, was built in another scope, or is not supported."""
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"{method} takes the model first: trainer.{method}(model, x, ...). Received: {type(model).__name__}."
        )
    if model.distribute_strategy is not strategy:
        raise ConfigError(
            f"Model {model.name!r} was not built in this trainer's scope: build and compile it in "
            "`with trainer.scope():`."
        )
    unsupported.check_model(model)
    unsupported.warn_of_new_gpus(model)


def check_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises ConfigError if a callback's `writes` names an attribute that the callback does not have."""
    for callback in callbacks:
        if (name := place_attribute(callback)) and not hasattr(callback, name):
            raise ConfigError(
                f"{type(callback).__name__}.writes must name the attribute that says where the callback writes. Received: "
                f"{name!r}, which the callback does not have. Set self.{name} in its __init__."
            )


def check_consistency(
    ranks: Ranks, model: keras.Model, data: Data, validation_data: Data, arguments: Mapping[str, Any]
) -> None:
    """Checks before training that all workers pass the same arguments and run the same program. A collective; raises ConfigError on all workers.

    A difference would end the run later, train on some examples twice, or train another model than the user intended.
    """
    if ranks.size == 1:
        return
    local = {name: _number(arguments.get(name)) for name in _COMPARED_NUMBERS}
    local |= {
        f"{name} given (1) or None (0)": float(value is not None)
        for name, value in _present(validation_data, arguments)
    }
    for name, value in (("x", data), ("validation_data", validation_data)):
        local |= {
            f"own rows (1) or shared data (0) in {name}": float(worker_rows.is_own(value)),
            f"length of {name}": _length(value),
        }
    orders = [*_data_order(data), *_data_order(validation_data)]
    arrays = _Arrays(data, validation_data, arguments)
    program = program_likeness.describe(model, arguments, ranks.size)
    numbers = (
        *local.values(),
        *(float(zlib.crc32(text.encode())) for text in orders),
        program_likeness.digest(program),
    )
    gathered, digests = np.split(ranks.gather(*numbers, *arrays.digests()), [len(numbers)], axis=1)
    *unlike, is_other_program = (len(set(column)) > 1 for column in gathered.T)
    faults = [
        f"{name} must be the same on all workers of a fit. Received: {_by_worker(column)}."
        for name, column, differs in zip(local, gathered.T, unlike, strict=False)
        if differs
    ]
    if not faults and any(unlike):
        faults = [_order_difference_message(ranks, orders[unlike.index(True) - len(local)])]
    if arrays.differ(digests) and (not faults or all(fault.startswith("length of") for fault in faults)):
        faults.append(arrays.difference_message(ranks, digests))
    if is_other_program:
        faults.insert(0, program_likeness.difference_message(ranks, program))
    if faults:
        raise ConfigError(faults)


def check_data_consistency(ranks: Ranks, data: Data, arguments: Mapping[str, Any]) -> None:
    """Checks before `evaluate` and `predict` that all workers pass the same arrays, or that all pass own rows. A collective."""
    arrays = _Arrays(data, None, arguments)
    is_own, digests = np.split(ranks.gather(float(worker_rows.is_own(data)), *arrays.digests()), [1], axis=1)
    if len(set(is_own[:, 0])) > 1:
        raise ConfigError(
            f"own rows (1) or shared data (0) in x must be the same on all workers of a call. Received: {_by_worker(is_own[:, 0])}."
        )
    if arrays.differ(digests):
        faults = [arrays.difference_message(ranks, digests)]
        raise ConfigError(faults)


def check_batch(ranks: Ranks, method: str, batch: Structure) -> None:
    """Checks that all workers pass the same batch to `train_on_batch` or one of its siblings. A collective; raises ConfigError on all workers."""
    digests = ranks.gather(array_digest.digest(batch), _length(batch))
    if _unlike(digests).any():
        local = array_digest.describe(batch)
        raise ConfigError(
            f"{method} must receive the same batch on all workers, because each replica takes its part of the rows. Received: "
            f"{_texts_by_worker(ranks, local, 'no arrays')}. Pass the same global batch on each worker. Or, if each worker has its own part of the "
            "batch, call the method in keras.distribution.DataParallel(auto_shard_dataset=False).scope()."
        )


def check_class_weight(data: Data, class_weight: Mapping[int, float] | None) -> None:
    """Raises ConfigError for class weights on a DistributedDataset, which cannot be mapped to examples with weights."""
    if class_weight is not None and isinstance(data, tf.distribute.DistributedDataset):
        raise ConfigError(
            "class_weight cannot weight data that are distributed already (by experimental_distribute_dataset or "
            "distribute_datasets_from_function). Give fit the tf.data.Dataset itself, or have it yield (x, y, sample_weight)."
        )


def own_sizes(ranks: Ranks, data: Data) -> list[int] | None:
    """Returns the number of each worker's own examples or batches; None if workers share the data. A collective."""
    if ranks.size == 1 or not worker_rows.is_own(data):
        return None
    size = int(data.cardinality()) if isinstance(data, tf.data.Dataset) else _length(data.x)
    return [int(own_size) for own_size in ranks.gather(float(size))[:, 0]]


class _Arrays:
    """The arrays in this worker's arguments, and their comparison with the other workers' arrays."""

    def __init__(self, data: Data, validation_data: Data, arguments: Mapping[str, Any]):
        self._arguments = {
            "x": data,
            "y": arguments.get("y"),
            "sample_weight": arguments.get("sample_weight"),
            "validation_data": validation_data,
        }
        self._kinds = {name: _kinds(value) for name, value in self._arguments.items()}
        self._arrays = {name: _arrays_of(value) for name, value in self._arguments.items()}

    def digests(self) -> list[float]:
        """Returns this worker's digests: for each argument one of its types and shapes, then for each argument one of its values."""
        kinds = [float(zlib.crc32(kind.encode())) for kind in self._kinds.values()]
        return [*kinds, *map(array_digest.digest, self._arrays.values())]

    def differ(self, digests: np.ndarray) -> bool:
        """Returns whether the digests differ between workers."""
        return bool(_unlike(digests).any())

    def difference_message(self, ranks: Ranks, digests: np.ndarray) -> str:
        """Returns the message about the first difference. A collective."""
        name = [*self._arrays, *self._arrays][_unlike(digests).argmax()]
        if isinstance(self._arguments[name], worker_rows.OwnRows):
            return (
                "own_rows must hold arrays of the same types, with rows of the same shape, on all workers. Received: "
                f"{_texts_by_worker(ranks, self._kinds[name], 'no arrays')}."
            )
        if isinstance(data := self._arguments[name], StoredData):
            return (
                f"{data.source.origin} in {name} must find the same files, with the same contents, and have the same options on all workers. Received: "
                f"{_texts_by_worker(ranks, self._kinds[name], 'no arrays')}."
            )
        local = array_digest.describe(self._arrays[name])
        if isinstance(data, tf.data.Dataset):
            return (
                f"The dataset in {name} must hold the same tensors on all workers, because each worker trains on its share of every batch. Received: "
                f"{_texts_by_worker(ranks, local, 'no tensors')}. Make it from the same arrays, in the same order, on all workers. Or, if each "
                "worker has different rows, such as x[rank::size], pass tfdist.data.own_rows(x, y), or set "
                "experimental_distribute.auto_shard_policy of the dataset's options to AutoShardPolicy.OFF."
            )
        return (
            f"The arrays in {name} must be the same on all workers, because each worker trains on its share of every batch. Received: "
            f"{_texts_by_worker(ranks, local, 'no arrays')}. Give all workers the same arrays, in the same order. Or, if each worker has "
            "different rows, such as x[rank::size], pass tfdist.data.own_rows(x, y) in place of x and y."
        )


def _unlike(digests: np.ndarray) -> np.ndarray:
    """Returns which columns differ between workers."""
    spread = digests.max(0) - digests.min(0)
    return spread > array_digest.TOLERANCE * np.maximum(1, np.abs(digests).max(0))


def _arrays_of(data: Data) -> Structure:
    """Returns the arrays, or the tensors of a dataset, that must be equal on all workers."""
    if isinstance(data, tf.data.Dataset) and not worker_rows.is_own(data):
        return graph.tensors(data)
    is_opaque = isinstance(data, (tf.data.Dataset, tf.distribute.DistributedDataset, worker_rows.OwnRows, StoredData))
    return None if is_opaque else data


def _kinds(data: Data) -> str:
    if isinstance(data, StoredData):
        return data.describe()
    return array_digest.kinds((data.x, data.y, data.sample_weight) if isinstance(data, worker_rows.OwnRows) else data)


def _present(validation_data: Data, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "validation_data", validation_data
    for name in ("y", "sample_weight", "class_weight"):
        yield name, arguments.get(name)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float, np.number)) else _NO_NUMBER


def _by_worker(column: Iterable[float]) -> str:
    return ", ".join(
        f"{'none' if number == _NO_NUMBER else f'{number:g}'} on worker:{rank}" for rank, number in enumerate(column)
    )


def _length(data: Data) -> float:
    """Returns the number of examples in arrays or of batches in a dataset. For workers' own data, returns INFINITE_CARDINALITY or 0.0 (finite)."""
    if worker_rows.is_own(data):
        endless = isinstance(data, tf.data.Dataset) and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY
        return float(tf.data.INFINITE_CARDINALITY) if endless else 0.0
    if isinstance(data, tf.data.Dataset):
        return float(data.cardinality())
    if isinstance(data, StoredData):
        return float(data.num_examples)
    first = next((leaf for leaf in tf.nest.flatten(data) if hasattr(leaf, "shape")), None)
    return float(first.shape[0]) if first is not None and len(first.shape) else _NO_NUMBER


def _data_order(data: Data) -> list[str]:
    """Returns `_MOST_TRANSFORMATIONS` texts that describe how a dataset orders its elements; all are empty if each worker has its own dataset."""
    texts = []
    if isinstance(data, tf.data.Dataset) and not worker_rows.is_own(data):
        texts = graph.describe_order(data)
    last = _MOST_TRANSFORMATIONS - 1
    return [*texts[:last], *[""] * (last - len(texts)), " ".join(texts[last:])]


def _order_difference_message(ranks: Ranks, local: str) -> str:
    """Returns the message about the first difference between the workers' datasets. A collective."""
    return (
        "The dataset must yield the same elements in the same order on all workers, because each worker trains on its share. Received: "
        f"{_texts_by_worker(ranks, local, 'no more transformations')}. Seeds differ if one worker has drawn more random "
        "numbers or created more datasets than the others: make the same calls on all workers, or give a seed to `shuffle` "
        "and similar functions (`seed=` of keras.utils.image_dataset_from_directory, which shuffles unless "
        "shuffle=False). If each worker has its own data, set experimental_distribute.auto_shard_policy of the dataset's "
        "options to AutoShardPolicy.OFF: then each worker reads all of its own dataset, in batches of the global size."
    )


def _texts_by_worker(ranks: Ranks, local: str, nothing: str) -> str:
    """Returns the beginning of each worker's text, by worker. A collective."""
    texts = ranks.gather_texts(local[:_TEXT_LENGTH])
    return ", ".join(f"{text or nothing} on worker:{rank}" for rank, text in enumerate(texts))
