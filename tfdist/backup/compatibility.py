"""Comparison of this training run with the run that wrote a backup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Data, Json
from tfdist.compat import optimizer_search
from tfdist.data.stored import StoredData
from tfdist.data.worker_rows import is_own
from tfdist.errors import ConfigError, format_value, list_first

_ABSENT = object()
_NAMED = 5  # differences that a message names


def describe_model(model: keras.Model) -> dict[str, Any]:
    """Returns the description of a model and its optimizers."""
    optimizers = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizer_search.optimizers(model)]
    return {
        "optimizer": {str(number): _config(optimizer) for number, optimizer in enumerate(optimizers)},
        "steps_per_execution": model.steps_per_execution,
        "model": _config(model),
    }


def describe_data(x: Data, y: Data) -> dict[str, Any]:
    """Returns the types, shapes and size of training data, as far as they are known."""
    if isinstance(x, tf.data.Dataset):
        described: dict[str, Any] = {"elements": str(x.element_spec)}
        if not is_own(x):  # the number of own batches differs between workers
            described["batches"] = int(x.cardinality())
        return described
    if isinstance(x, StoredData):
        return {"stored": x.describe()}
    return {name: str(value.shape) for name, value in (("x", x), ("y", y)) if hasattr(value, "shape")}


def to_jsonable(value: Any) -> Json:
    """Returns a JSON-compatible form of a value, which is the same in each run of a program."""
    if isinstance(value, Mapping):
        if value.get("registered_name") == "tfdist>Embedding":
            # A backup continues with any number of shards.
            value = {**value, "config": {**value["config"], "shards": "auto"}}
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return to_jsonable(value.tolist())
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "get_config"):
        return to_jsonable(_config(value))
    return getattr(value, "__qualname__", type(value).__qualname__)


def _config(value: Any) -> dict[str, Any]:
    try:
        return {"class": type(value).__name__, **value.get_config()}
    except Exception:  # a user's class; the variables still show differences
        return {"class": type(value).__name__}


def differences(now: Json, then: Json, path: str = "") -> Iterator[str]:
    """Yields a phrase for each value that differs: `config.learning_rate is 0.1, and was 0.01`."""
    if isinstance(now, list) and isinstance(then, list):
        now = dict(enumerate(now))
        then = dict(enumerate(then))
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        for key in {**then, **now}:
            yield from differences(now.get(key, _ABSENT), then.get(key, _ABSENT), f"{path}.{key}".removeprefix("."))
    elif now is _ABSENT:
        yield f"{path} is missing, and was {format_value(then)}"
    elif then is _ABSENT:
        yield f"{path} is {format_value(now)}, and was not there"
    elif now != then and not (now != now and then != then):  # two NaNs are equal here
        yield f"{path} is {format_value(now)}, and was {format_value(then)}"


def check_same_training(now: Json, then: Json, path: str, folder: str) -> None:
    """Raises ConfigError if the description of this training (`now`) differs from the description in a backup (`then`)."""
    different = list(differences(now, then))
    if different:
        raise ConfigError(
            f"The backup {path} is of another training: {list_first(different, _NAMED, '; ')}. "
            f"To train from the beginning, remove {folder!r} or choose another backup_dir."
        )
