"""Metrics that are no mean over examples: as a user writes them, and by plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

LENGTH = 4  # of what `Last` keeps
Batch = tuple[np.ndarray, np.ndarray, Any]  # targets, outputs, weights or None


def span(y: Any, out: Any) -> Any:
    return ops.max(out) - ops.min(out)


def product(y: Any, out: Any) -> Any:
    return ops.mean(ops.abs(ops.cast(y, out.dtype))) * ops.mean(ops.abs(out))


class Top(keras.metrics.Metric):
    """The greatest output."""

    def __init__(self, name: str):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros")

    def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(out))))

    def result(self) -> Any:
        return self.value


class Heavy(Top):
    """The greatest output times its example's weight."""

    def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
        rows = _greatest_by_row(ops.abs(out))
        weights = 1 if sample_weight is None else _greatest_by_row(ops.cast(sample_weight, out.dtype))
        self.value.assign(ops.maximum(self.value, ops.max(rows * weights)))


class Last(keras.metrics.Metric):
    """The mean of the last outputs."""

    def __init__(self, name: str):
        super().__init__(name=name)
        self.values = self.add_variable((LENGTH,), "zeros")

    def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
        new = ops.reshape(ops.abs(out[..., 0]), [-1])
        self.values.assign(ops.concatenate([self.values, ops.cast(new, self.dtype)])[-LENGTH:])

    def result(self) -> Any:
        return ops.mean(self.values)


class Several(keras.metrics.Metric):
    """The mean over batches of the greatest target times the greatest output."""

    def __init__(self, name: str):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros")
        self.batches = self.add_variable((), "zeros", dtype="int64")

    def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
        greatest = ops.max(ops.abs(ops.cast(y, out.dtype)))
        self.total.assign_add(ops.cast(greatest * ops.max(ops.abs(out)), self.dtype))
        self.batches.assign_add(1)

    def result(self) -> Any:
        return self.total / ops.cast(self.batches, self.dtype)


class Counted(keras.metrics.Metric):
    """Counts steps, from 1."""

    def __init__(self, name: str):
        super().__init__(name=name)
        self.count = self.add_variable((), keras.initializers.Constant(1), dtype="int32")

    def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(1)

    def reset_state(self) -> None:
        self.count.assign(1)

    def result(self) -> Any:
        return self.count


class CountedRows(Counted):
    """Counts examples, from 1."""

    sums_examples = True

    def update_state(self, y: Any, out: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(ops.shape(out)[0])


def _greatest_by_row(values: Any) -> Any:
    return ops.max(ops.reshape(values, (ops.shape(values)[0], -1)), axis=-1)


_FUNCTIONS = {"span": span, "product": product}
_CLASSES = {
    "top": Top,
    "heavy": Heavy,
    "last": Last,
    "several": Several,
    "counted": Counted,
    "counted_rows": CountedRows,
}


def make(names: Iterable[str]) -> list[Any]:
    """Returns what a model is compiled with."""
    return [_FUNCTIONS[name] if name in _FUNCTIONS else _CLASSES[name](name) for name in names]


def _row_maxima(values: np.ndarray) -> np.ndarray:
    return np.abs(values).reshape(len(values), -1).max(-1)


def _of_one(y: np.ndarray, out: np.ndarray, weights: Any) -> float:
    return (_row_maxima(out) * (1 if weights is None else _row_maxima(np.asarray(weights)))).max()


# Each is computed of all batches of an epoch.
_RIGHT: dict[str, Callable[[list[Batch]], Any]] = {
    "span": lambda batches: np.mean([out.max() - out.min() for _, out, _ in batches]),
    "product": lambda batches: np.mean([np.abs(y).mean() * np.abs(out).mean() for y, out, _ in batches]),
    "top": lambda batches: max(np.abs(out).max() for _, out, _ in batches),
    "heavy": lambda batches: max(_of_one(*batch) for batch in batches),
    "last": lambda batches: np.mean(
        np.concatenate([np.zeros(LENGTH), *(np.abs(out[..., 0]).ravel() for _, out, _ in batches)])[-LENGTH:]
    ),
    "several": lambda batches: np.mean([np.abs(y).max() * np.abs(out).max() for y, out, _ in batches]),
    "counted": lambda batches: 1 + len(batches),
    "counted_rows": lambda batches: 1 + sum(len(out) for _, out, _ in batches),
}


def right(names: Iterable[str], batches: list[Batch]) -> dict[str, float]:
    """Returns what the metrics must say of an epoch's batches."""
    return {name: float(_RIGHT[name](batches)) for name in names}
