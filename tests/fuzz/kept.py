"""Untrained weights that a layer assigns in each step: as a user writes them, and by plain arithmetic."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

import tfdist
from tests.fuzz.cases import AGGREGATED, SCALED

LENGTH = 5  # of the queue
_INTEGERS = {"sum_int": "int64", "first_int": "int32", "count": "int64"}


class Keeps(keras.layers.Layer):
    """Assigns a weight of each kind, from one number for each example.

    Attributes:
        only_shows: Whether it assigns nothing, for the arithmetic to do so.
        values: The numbers of the last batch, if `only_shows`.
    """

    def __init__(self, kinds: tuple[str, ...]):
        super().__init__(name="keeps")
        self.supports_masking = True
        self.only_shows = False
        self.values = np.zeros(0)
        self.kept: dict[str, Any] = {}
        self._kinds = kinds

    def build(self, shape: Any) -> None:
        for kind in self._kinds:
            if kind != SCALED:
                self.kept[kind] = self.add_weight(
                    shape=(LENGTH,) if kind == "queue" else (),
                    initializer="zeros",
                    trainable=False,
                    aggregation=AGGREGATED.get(kind, "none"),
                    name=kind,
                    dtype=_INTEGERS.get(kind),
                )

    def call(self, x: Any) -> Any:
        numbers = ops.cast(x, self.compute_dtype)
        values = ops.mean(numbers, axis=list(range(1, len(x.shape))))
        if self.only_shows:
            self.values = values.numpy()
        else:
            for kind in self._kinds:
                if kind != SCALED:
                    self._assign(kind, self.kept[kind], values)
        if SCALED not in self._kinds:
            return x
        whole = x if self.only_shows else tfdist.whole_batch(x)
        return x * (1 + ops.mean(whole))

    def _assign(self, kind: str, weight: Any, values: Any) -> None:
        size = ops.cast(ops.shape(values)[0], weight.dtype)
        if kind == "sum":
            weight.assign_add(ops.sum(values))
        elif kind in ("sum_int", "first_int"):
            weight.assign(weight + size)
        elif kind == "mean":
            weight.assign(0.75 * weight + 0.25 * ops.mean(values))
        elif kind == "first":
            weight.assign(values[0])
        else:
            rows = tfdist.whole_batch(values)
            if kind == "queue":
                weight.assign(ops.concatenate([rows, weight])[:LENGTH])
            elif kind == "top":
                weight.assign(ops.maximum(weight, ops.max(rows)))
            else:
                weight.assign_add(ops.cast(ops.shape(rows)[0], weight.dtype))


class Right:
    """What the weights must hold, step by step.

    Args:
        model: A model that may have the layer, which assigns nothing from now on.
    """

    def __init__(self, model: keras.Model):
        found = [layer for layer in model.layers if isinstance(layer, Keeps)]
        self._layer = found[0] if found else None
        for layer in found:
            layer.only_shows = True

    def step(self, sizes: list[int]) -> None:
        """Assigns what the weights hold after the batch that the model has just had.

        Args:
            sizes: The examples of each replica, which come one after the other.
        """
        if self._layer is None:
            return
        values, kept = self._layer.values, self._layer.kept
        parts = np.split(values, np.cumsum(sizes)[:-1])
        mean = np.mean([part.mean() for part in parts if len(part)])  # over the replicas with examples
        before = {kind: weight.numpy() for kind, weight in kept.items()}
        after = {
            "sum": lambda old: old + values.sum(),
            "sum_int": lambda old: old + len(values),
            "mean": lambda old: 0.75 * old + 0.25 * mean,
            "first": lambda old: parts[0][0] if len(parts[0]) else old,
            "first_int": lambda old: old + len(parts[0]),
            "queue": lambda old: np.concatenate([values, old])[:LENGTH],
            "top": lambda old: max(old, values.max()),
            "count": lambda old: old + len(values),
        }
        for kind, weight in kept.items():
            weight.assign(after[kind](before[kind]))
