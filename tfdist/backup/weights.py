"""A model's weights out of a backup, on one device: for who follows a training without taking part in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.backup.save_point import SavePoint
from tfdist.backup.state import named_variables
from tfdist.backup.storage import SHARED, Storage
from tfdist.compat import optimizer_search
from tfdist.errors import ConfigError

_Key = tuple[str, int]  # a variable's path, and its number among those with this path


def read_weights(storage: Storage, point: SavePoint, manifest: Mapping[str, Any]) -> dict[_Key, np.ndarray]:
    """Returns the values of all variables that a backup holds, as an evaluation at this step would have them.

    What each replica has of its own, such as moving statistics, is averaged over all replicas, as `Trainer.evaluate` does.

    Args:
        storage: Where the backup is.
        point: When it was taken.
        manifest: Its manifest.

    Raises:
        CorruptBackupError: Some of it cannot be read, or is not what was written.
    """
    shared = storage.read_part(point, SHARED)
    variables = manifest["about"]["variables"]
    own: dict[str, list[np.ndarray]] = {}
    for rank in range(manifest["tasks"]):
        for key, value in storage.read_part(point, f"rank-{rank}").items():  # as `7/batch_norm/moving_mean/0`
            if (name := key.rpartition("/")[0]) in variables:
                own.setdefault(name, []).append(value)
    names = sorted(variables, key=lambda name: int(name.partition("/")[0]))
    return dict(_keyed((name, shared[name] if name in shared else _mean(own[name])) for name in names))


def load_weights(model: keras.Model, weights: Mapping[_Key, np.ndarray], source: str) -> None:
    """Sets a model's variables, without those of its metrics and optimizer.

    Args:
        model: The model, built.
        weights: What `read_weights` has returned.
        source: Where they are from, for messages.

    Raises:
        ConfigError: They are not those of this model.
    """
    optimizers = optimizer_search.optimizers(model)
    without = [*model.metrics_variables, *(variable for each in optimizers for variable in each.variables)]
    skipped = {id(variable.value) for variable in without}
    for key, variable in _keyed(named_variables(model)):
        if id(variable) in skipped:
            continue
        value = weights.get(key)
        if value is None or value.shape != tuple(variable.shape):
            raise ConfigError(
                f"The weights of {source} are not this model's: {key[0]} has shape {tuple(variable.shape)} here, and "
                f"{'is missing' if value is None else f'{value.shape}'} there. Build the model of the training."
            )
        for component in model.distribute_strategy.experimental_local_results(variable):
            component.assign(tf.cast(value, component.dtype))


def _keyed(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[_Key, Any]]:
    """Yields values by their path, without the numbers that variables have in one process: metrics may be missing in another."""
    counts: dict[str, int] = {}
    for name, value in named:
        path = name.partition("/")[2]
        counts[path] = counts.get(path, -1) + 1
        yield (path, counts[path]), value


def _mean(values: list[np.ndarray]) -> np.ndarray:
    # As the kinds of bfloat16 are none of NumPy's own, by the tensors' type.
    floating = tf.as_dtype(values[0].dtype).is_floating
    return np.mean(np.asarray(values, np.float64), axis=0) if floating else values[0]
