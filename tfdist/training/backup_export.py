"""Exports the model of a backup on one device, and reads the weights of backups, for `tfdist backup` and the evaluator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.backup import compatibility, search
from tfdist.backup.contents import SavePoint
from tfdist.backup.files import ReadError
from tfdist.backup.state import named_variables, replica_key, replicas_of
from tfdist.backup.storage import Storage
from tfdist.compat import optimizer_search
from tfdist.compat.split_value import is_split
from tfdist.config import TrainConfig
from tfdist.config.train import fixed
from tfdist.errors import BackupError, ConfigError, format_value
from tfdist.gradients.configured_optimizer import build_optimizer
from tfdist.runtime.log import logger
from tfdist.training import configured, task_checks
from tfdist.training.trainer import Trainer

_SAME = ("task", "task_options", "precision")  # fields on which the outputs of given weights depend
_Key = tuple[str, int]  # a variable's path, and its index among the variables with this path


def export(config: TrainConfig, folder: str, path: str, step: int | None = None) -> str:
    """Writes the model of the newest complete backup, or of the backup of `step`, and returns the path of this backup.

    The weights are those that an evaluation at the backup's step uses. The optimizer has its initial state. Raises BackupError
    without a complete backup, and ConfigError for a backup of another configuration.
    """
    storage = Storage(folder, 0, 1)
    point, manifest, weights = _newest(storage, step)
    backup = storage.path(point)
    backed_up = manifest["about"].get("config", {})
    current = compatibility.to_jsonable(fixed(config))
    for name in _SAME:
        if backed_up.get(name) != current[name]:
            raise ConfigError(
                f"The backup {backup} was written under another configuration: {name} is {format_value(backed_up.get(name))} in the backup, and "
                f"{format_value(current[name])} in config.json. Give the work directory of the run that wrote the backup."
            )
    configured.fix_threads(config)
    trainer = Trainer("one_device", cluster=False)
    configured.prepare_process(config)
    task = task_checks.make_task(config.task, config.task_options)
    in_sync = 1 if config.strategy.traits.asynchronous else manifest["replicas"]
    batch_size = config.global_batch_size or config.per_replica_batch_size * in_sync
    steps = config.steps_per_epoch or task.steps_per_epoch(batch_size)
    model = configured.build_model(trainer, config, task, lambda: build_optimizer(config, in_sync, steps))
    if not model.built:
        data = task.eval_data(batch_size)
        if data is None:
            data = task.train_data(tf.distribute.InputContext(), batch_size, config.seed)
        trainer.evaluate(model, data.take(1), verbose=0)
    with trainer.scope():
        model.optimizer.build(model.trainable_variables)  # otherwise Keras would not load the saved file
    load_weights(model, weights, backup)
    trainer.save(model, path, delete_backup=False)
    return backup


def _newest(storage: Storage, step: int | None) -> tuple[SavePoint, Mapping[str, Any], dict[_Key, np.ndarray]]:
    why: list[str] = []
    for point in _points(storage, step):
        try:
            return point, *read_weights(storage, point)
        except (ReadError, ConfigError) as e:
            why.append(str(e))
            logger.warning(f"{e}; trying the backup before it")
    message = f"{storage.folder!r} holds no complete backup"
    if step is not None:
        message += f" of step {step}"
    if why:
        message += f": {'; '.join(why)}"
    raise BackupError(f"{message}.")


def _points(storage: Storage, step: int | None) -> Iterator[SavePoint]:
    try:
        points = storage.points()
    except ReadError as e:
        raise BackupError(f"{e}") from e
    yield from (point for point in points if step is None or point.step == step)


def read_weights(storage: Storage, point: SavePoint) -> tuple[Mapping[str, Any], dict[_Key, np.ndarray]]:
    """Returns a backup's manifest, and the values of all its variables, as an evaluation at the backup's step uses them.

    State that differs between replicas, such as moving statistics, is averaged, as `Trainer.evaluate` does. Raises as `search.read_backup` does.
    """
    manifest, shared, parts = search.read_backup(storage, point)
    variables = manifest["about"]["variables"]
    own: dict[str, list[np.ndarray]] = {}
    for tensors in parts:
        for name, replicas in replicas_of(tensors).items():
            own.setdefault(name, []).extend(tensors[replica_key(replica, name)] for replica in replicas)
    named = []
    for name in sorted(variables, key=lambda name: int(name.partition("/")[0])):
        value = shared.get(name)
        if value is None:
            value = _mean(own[name])
        named.append((name, np.asarray(value)))
    return manifest, dict(_keyed(named))


def load_weights(model: keras.Model, weights: Mapping[_Key, np.ndarray], source: str) -> None:
    """Assigns weights to the variables of a built model, except those of its metrics and optimizer. Raises ConfigError if the weights do not fit.

    `source` names the origin of the weights in messages.
    """
    optimizers = optimizer_search.optimizers(model)
    excluded = [*model.metrics_variables, *(variable for optimizer in optimizers for variable in optimizer.variables)]
    skipped = {id(held) for variable in excluded for held in (variable, variable.value)}
    for key, variable in _keyed(named_variables(model)):
        if skipped.intersection(map(id, variable.variables() if is_split(variable) else [variable])):
            continue
        value = weights.get(key)
        shape = "is missing" if value is None else f"{value.shape}"
        if value is None or value.shape != tuple(variable.shape):
            raise ConfigError(
                f"The weights of {source} do not fit this model: {key[0]} has shape {tuple(variable.shape)} in the model, and "
                f"{shape} in the backup. Build the model of the training."
            )
        if is_split(variable):
            variable.assign(value)
            continue
        for component in model.distribute_strategy.experimental_local_results(variable):
            component.assign(tf.cast(value, component.dtype))


def _keyed(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[_Key, Any]]:
    """Yields values by path and index among equal paths. A variable's number in its process does not count: another process may lack the metrics."""
    counts: dict[str, int] = {}
    for name, value in named:
        path = name.partition("/")[2]
        counts[path] = counts.get(path, -1) + 1
        yield (path, counts[path]), value


def _mean(values: list[np.ndarray]) -> np.ndarray:
    # NumPy does not classify bfloat16 as floating; TensorFlow does.
    if tf.as_dtype(values[0].dtype).is_floating:
        return np.mean(np.asarray(values, np.float64), axis=0)
    return values[0]
