"""What differs between two trainings that should be the same, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfdist import refusals
from tfdist.errors import shown

_ABSENT = object()


def about(model: keras.Model) -> dict[str, Any]:
    """Returns what makes a model and its optimizers, as plain values."""
    optimizers = [getattr(each, "inner_optimizer", each) for each in refusals.optimizers(model)]
    made = {
        "optimizer": {str(n): {"class": type(each).__name__, **each.get_config()} for n, each in enumerate(optimizers)},
        "steps_per_execution": model.steps_per_execution,
        "model": {},
    }
    try:
        made["model"] = model.get_config()
    except Exception:  # a class of the user's own; its variables still tell
        pass
    return made


def plain(value: Any) -> Any:
    """Returns a value as JSON can hold it, for `json.dumps(default=...)`; the same in each run of a program."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if hasattr(value, "get_config"):
        return {"class": type(value).__name__, **value.get_config()}
    return getattr(value, "__qualname__", type(value).__qualname__)


def differences(now: Any, then: Any, path: str = "") -> Iterator[str]:
    """Yields a phrase for each value that differs: `config.learning_rate is 0.1, and was 0.01`."""
    if isinstance(now, list) and isinstance(then, list):
        now, then = dict(enumerate(now)), dict(enumerate(then))
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        for key in {**then, **now}:
            yield from differences(now.get(key, _ABSENT), then.get(key, _ABSENT), f"{path}.{key}" if path else str(key))
    elif now is _ABSENT:
        yield f"{path} is missing, and was {shown(then)}"
    elif then is _ABSENT:
        yield f"{path} is {shown(now)}, and was not there"
    elif now != then and not (now != now and then != then):
        yield f"{path} is {shown(now)}, and was {shown(then)}"
