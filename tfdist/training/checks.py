"""Checks the arguments of a `Trainer` and of its methods, among them those that must be equal on all workers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Data, Structure
from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.collectives import communicator
from tfdist.collectives.ranks import Ranks
from tfdist.compat import unsupported
from tfdist.config import StrategyConfig, relations
from tfdist.config.train import NAN_POLICIES
from tfdist.data import graph, worker_rows
from tfdist.data.stored import StoredData
from tfdist.errors import ConfigError, unknown_name_message
from tfdist.strategy import Strategy, as_ours
from tfdist.training import array_digest, program_likeness
from tfdist.training.alike import Alike
from tfdist.training.callback_kinds import place_attribute

# Arguments besides the data that must be equal on all workers.
_ARGUMENTS = (
    *("epochs", "initial_epoch", "steps_per_epoch", "batch_size", "validation_steps", "validation_batch_size"),
    *("validation_freq", "validation_split", "class_weight", "shuffle"),
)
_SHARE = "Each worker trains on its share of every batch: give all workers the same data, in the same order"
_OWN_ROWS = "Or, if each worker has different rows, such as x[rank::size], pass tfdist.data.own_rows(x, y)"


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
    if policy not in NAN_POLICIES:
        raise ConfigError(unknown_name_message("nan_policy", policy, NAN_POLICIES))
    if policy == "skip":
        relations.check({**strategy.config.asked(), "skip_steps": ""}, "skip_steps")


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


def check_is_model(model: object, method: str) -> None:
    """Raises ConfigError if `model`, the first argument of the trainer's `method`, is not a model."""
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"{method} takes the model first: trainer.{method}(model, ...). Received: {type(model).__name__}."
        )


def check_model(model: keras.Model, strategy: tf.distribute.Strategy, method: str) -> None:
    """Raises ConfigError if `model`, the first argument of the trainer's `method`, is not a model, was built in another scope, or is not supported."""
    check_is_model(model, method)
    if model.distribute_strategy is not strategy:
        raise ConfigError(
            f"Model {model.name!r} was not built in this trainer's scope: build and compile it in "
            "`with trainer.scope():`."
        )
    unsupported.check_model(model)
    unsupported.warn_of_new_gpus(model)


def check_compresses(strategy: Strategy) -> None:
    """Raises ConfigError if gradients of a strategy cannot be compressed."""
    communicator.check_compresses(strategy)
    if strategy.mesh:
        relations.check(("mesh", "compression"))


def check_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raises ConfigError if a callback's `writes` names an attribute that the callback does not have."""
    for callback in callbacks:
        name = place_attribute(callback)
        if name and not hasattr(callback, name):
            raise ConfigError(
                f"{type(callback).__name__}.writes must name the attribute that says where the callback writes. Received: "
                f"{name!r}, which the callback does not have. Set self.{name} in its __init__."
            )


def check_savers(callbacks: Sequence[keras.callbacks.Callback], ranks: Ranks, differ: bool) -> None:
    """Raises ConfigError on all ranks if callbacks cannot write a model whose state is in parts on the workers. A collective.

    `differ` means that ranks have other callbacks than the chief, so that they would not write together.
    """
    savers = [callback for callback in callbacks if isinstance(callback, keras.callbacks.ModelCheckpoint)]
    fault = next(filter(None, (_format_fault(str(saver.filepath)) for saver in savers)), "")
    if savers and differ and not fault:
        fault = (
            f"{type(savers[0]).__name__} writes a model whose state is in parts on the workers, which all workers do together: pass the same "
            "callbacks on all workers. Those that only read logs may be on one worker alone, if they declare only_observes = True."
        )
    fault = ranks.agree(fault)
    if fault:
        raise ConfigError(fault)


def check_averages(callbacks: Sequence[keras.callbacks.Callback], strategy: Strategy) -> None:
    """Raises ConfigError if a callback swaps moving averages that are split."""
    if any(isinstance(each, keras.callbacks.SwapEMAWeights) for each in callbacks):
        relations.check({**strategy.config.asked(), "SwapEMAWeights": ""}, "SwapEMAWeights")


def check_format(path: str) -> None:
    """Raises ConfigError if a file of this name cannot hold state that is in parts on the workers."""
    fault = _format_fault(path)
    if fault:
        raise ConfigError(fault)


def _format_fault(path: str) -> str:
    if path.endswith((".h5", ".hdf5")) and not path.endswith(".weights.h5"):
        return f"Keras' old format cannot hold state that is in parts on the workers: save to .keras or .weights.h5. Received: {path!r}."
    return ""


def check_consistency(
    ranks: Ranks, model: keras.Model, data: Data, validation_data: Data, arguments: Mapping[str, Any]
) -> None:
    """Checks before training that all workers pass the same arguments and run the same program. A collective; raises ConfigError on all workers.

    A difference would end the run later, train on some examples twice, or train another model than the user intended.
    """
    if ranks.size == 1:
        return
    alike = Alike(ranks)
    program_likeness.add_program(alike, model, ranks.size)
    _add_arguments(alike, data, validation_data, arguments)
    alike.check()


def check_data_consistency(ranks: Ranks, data: Data, arguments: Mapping[str, Any]) -> None:
    """Checks before `evaluate` and `predict` that all workers pass the same arguments. A collective; raises ConfigError on all workers."""
    alike = Alike(ranks)
    _add_arguments(alike, data, None, arguments)
    alike.check()


def check_batch(ranks: Ranks, method: str, batch: Structure) -> None:
    """Checks that all workers pass the same batch to `train_on_batch` or one of its siblings. A collective; raises ConfigError on all workers."""
    alike = Alike(ranks)
    remedy = (
        "Each replica takes its part of the rows: pass the same global batch on each worker. Or, if each worker has its own part of the "
        "batch, call the method in keras.distribution.DataParallel(auto_shard_dataset=False).scope()."
    )
    _add_arrays(alike, f"The batch of {method}", batch, remedy)
    alike.check()


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
    if isinstance(data, worker_rows.OwnRows):
        size = float(tf.nest.flatten(data.x)[0].shape[0])
    else:
        size = float(data.cardinality())
    return [int(own_size) for own_size in ranks.gather(size)[:, 0]]


def _add_arguments(alike: Alike, data: Data, validation_data: Data, arguments: Mapping[str, Any]) -> None:
    """Adds the arguments of a call, and the arrays, the datasets and the order of elements in them."""
    values = {
        "x": data,
        "y": arguments.get("y"),
        "sample_weight": arguments.get("sample_weight"),
        "validation_data": validation_data,
    }
    compared = {name: _kind(value) for name, value in values.items()}
    compared |= {name: arguments.get(name) for name in _ARGUMENTS}
    alike.add("The arguments of the call", program_likeness.describe(compared), "Pass the same ones on all workers.")
    for name, value in values.items():
        if isinstance(value, worker_rows.OwnRows):
            kinds = array_digest.kinds((value.x, value.y, value.sample_weight))
            remedy = "Give all workers arrays of the same types, with rows of the same shape."
            alike.add(f"The kind of own_rows in {name}", kinds, remedy)
        elif isinstance(value, StoredData):
            remedy = "All workers must find the same files, with the same contents, and give the same options."
            alike.add(f"{value.source.origin} in {name}", value.describe(), remedy)
        elif isinstance(value, tf.data.Dataset):
            _add_dataset(alike, f"The dataset in {name}", value)
        elif not isinstance(value, tf.distribute.DistributedDataset):
            _add_arrays(alike, f"The arrays in {name}", value, f"{_SHARE}. {_OWN_ROWS} in place of x and y.")


def _add_dataset(alike: Alike, name: str, dataset: tf.data.Dataset) -> None:
    batches = int(dataset.cardinality())
    if worker_rows.is_own(dataset):
        length = "endless" if batches == tf.data.INFINITE_CARDINALITY else "finite"
        alike.add(name, length, "Repeat it on all workers, or on none.")
        return
    remedy = (
        f"{_SHARE}. Seeds differ if one worker has drawn more random numbers or created more datasets than the others: make the same calls "
        "on all workers, or give a seed to `shuffle` and similar functions (`seed=` of keras.utils.image_dataset_from_directory, which shuffles "
        f"unless shuffle=False). {_OWN_ROWS}, or set experimental_distribute.auto_shard_policy of the dataset's options to "
        "AutoShardPolicy.OFF: then each worker reads all of its own dataset, in batches of the global size."
    )
    alike.add(name, "\n".join([f"{batches} batches", *graph.describe_order(dataset)]), remedy)
    _add_arrays(alike, name, graph.tensors(dataset), remedy)


def _add_arrays(alike: Alike, name: str, arrays: Structure, remedy: str) -> None:
    """Adds the types and shapes of arrays, and their values."""
    alike.add(name, array_digest.shapes(arrays), remedy)
    alike.add(name, array_digest.describe(arrays), remedy, array_digest.digest(arrays))


def _kind(data: Data) -> str | None:
    if data is None:
        return None
    if worker_rows.is_own(data):
        return "own rows"
    if isinstance(data, tf.data.Dataset):
        return "a shared dataset"
    if isinstance(data, (StoredData, tf.distribute.DistributedDataset)):
        return type(data).__name__
    return "shared data"
