"""Methods of a model that a class overrides, or that an object gets assigned."""

from __future__ import annotations

from typing import Any

import keras

TIMES = 3  # as large is the overridden loss


def _doubled(logs: dict[str, Any]) -> dict[str, Any]:
    return {**logs, "two": 2 * logs["loss"]}


def of_class(kind: type[keras.Model], override: str) -> type[keras.Model]:
    """Returns a subclass that overrides a method; `kind`, if the override is none of a class."""

    class Metrics(kind):
        def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
            return _doubled(super().compute_metrics(*args, **kwargs))

    class Loss(kind):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return TIMES * super().compute_loss(*args, **kwargs)

    return {"metrics": Metrics, "loss": Loss}.get(override, kind)


def assign(model: keras.Model, override: str) -> None:
    """Assigns a method to the object, if the override is one of an object."""
    metrics, loss = model.compute_metrics, model.compute_loss
    if override == "metrics of an object":
        model.compute_metrics = lambda *args, **kwargs: _doubled(metrics(*args, **kwargs))
    if override == "loss of an object":
        model.compute_loss = lambda *args, **kwargs: TIMES * loss(*args, **kwargs)
