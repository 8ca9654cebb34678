"""Histograms of a model's weights."""

from __future__ import annotations

import keras
import numpy as np

_BUCKETS = 30  # as TensorBoard's own


def weight_histograms(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns a `[buckets, 3]` array, left and right edge and count, for each weight, by the tags of Keras' TensorBoard.

    Of a weight that each replica has its own of, such as a moving statistic, this process's first one is taken. Numbers that are
    not finite are left out.
    """
    local = model.distribute_strategy.experimental_local_results
    weights = {weight.path: local(weight.value)[0].numpy() for layer in model.layers for weight in layer.weights}
    return {f"{path.replace(':', '_')}/histogram": histogram(values) for path, values in weights.items()}


def histogram(values: np.ndarray) -> np.ndarray:
    """Returns `[buckets, 3]`: left and right edge and count."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not values.size or values.min() == values.max():  # one bucket has all, as TensorBoard's own
        edge = values[0] if values.size else 0.0
        return np.array([[edge, edge, 0]] * (_BUCKETS - 1) + [[edge, edge, values.size]])
    counts, edges = np.histogram(values, _BUCKETS)
    return np.stack([edges[:-1], edges[1:], counts], 1)
