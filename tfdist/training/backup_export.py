"""A model out of a backup of a run of `tfdist train`, on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.backup import compatibility, listing
from tfdist.backup.files import ReadError
from tfdist.backup.save_point import SavePoint
from tfdist.backup.storage import Storage
from tfdist.backup.weights import load_weights, read_weights
from tfdist.config import TrainConfig, registry
from tfdist.config.train import fixed
from tfdist.errors import BackupError, ConfigError, format_value
from tfdist.gradients.configured_optimizer import build_optimizer
from tfdist.runtime.log import logger
from tfdist.training import configured
from tfdist.training.trainer import Trainer

_SAME = ("task", "task_options", "precision")  # what decides what the model computes of its weights


def export(config: TrainConfig, folder: str, path: str, step: int | None = None) -> str:
    """Writes the model of the newest whole backup, as an evaluation at its step would have it; its optimizer begins anew.

    Args:
        config: The run's configuration.
        folder: Where the backups are.
        path: The model's file, which ends in `.keras`.
        step: Of which step. None means the newest.

    Returns:
        The path of the backup.

    Raises:
        BackupError: There is no whole backup.
        ConfigError: The backup is not of this configuration, or the model cannot be built.
    """
    storage = Storage(folder, 0, 1)
    point, manifest, weights = _newest(storage, step)
    backup = storage.path(point)
    then, now = manifest["about"].get("config", {}), compatibility.to_jsonable(fixed(config))
    for name in _SAME:
        if then.get(name) != now[name]:
            raise ConfigError(
                f"The backup {backup} is not of the configuration beside it: {name} was {format_value(then.get(name))}, and is "
                f"{format_value(now[name])} in config.json. Give the work directory of the run that wrote the backup."
            )
    trainer = Trainer("one_device", cluster=False)
    configured.prepare_process(config)
    task = registry.resolve("task", config.task, registry.TASKS)(config.task_options)
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
        model.optimizer.build(model.trainable_variables)  # or Keras would not load the file
    load_weights(model, weights, backup)
    trainer.save(model, path, delete_backup=False)
    return backup


def _newest(storage: Storage, step: int | None) -> tuple[SavePoint, dict[str, Any], dict[Any, Any]]:
    why: list[str] = []
    for point in _points(storage, step):
        try:
            manifest = listing.check_manifest(storage, point)
            return point, manifest, read_weights(storage, point, manifest)
        except ReadError as e:
            why.append(str(e))
            logger.warning(f"{e}; trying the backup before it")
    of_step = "" if step is None else f" of step {step}"
    raise BackupError(f"{storage.folder!r} holds no whole backup{of_step}{': ' if why else ''}{'; '.join(why)}.")


def _points(storage: Storage, step: int | None) -> Iterator[SavePoint]:
    try:
        points = storage.points()
    except ReadError as e:
        raise BackupError(f"{e}") from e
    yield from (point for point in points if step is None or point.step == step)
