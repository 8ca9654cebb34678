"""The models whose gradients are sent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

BATCH = 32  # examples per worker and step
MLP = (1024, 2048, 2048, 2048, 10)
WIDE = (1024, 4352, 4352, 4352, 2048, 10)
WIDTHS = {"mlp": MLP, "wide": WIDE}


def mlp(library: Any, widths: Sequence[int] = MLP) -> Any:
    """Returns an MLP, by default of 10.5 million parameters.

    Args:
        library: `keras` or `tf_keras`.
        widths: Of the input and of each layer.
    """
    hidden = [library.layers.Dense(width, activation="relu") for width in widths[1:-1]]
    return library.Sequential([library.Input((widths[0],)), *hidden, library.layers.Dense(widths[-1])])


def mlp_shapes(widths: Sequence[int] = MLP) -> list[tuple[int, ...]]:
    """Returns the shapes of its variables, in order."""
    return [shape for p, q in itertools.pairwise(widths) for shape in ((p, q), (q,))]


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of ResNet-50's variables, 25.6 million parameters, in order."""
    import keras

    return [tuple(variable.shape) for variable in keras.applications.ResNet50(weights=None).trainable_variables]


def transformer_shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of a small transformer's variables, 5.2 million parameters, in order."""
    width, inner, words = 256, 1024, 8000
    layer = [(width, width), (width,)] * 4 + [(width,)] * 4 + [(width, inner), (inner,), (inner, width), (width,)]
    return [*layer * 4, (width, words), (words,)]


SHAPES = {
    "mlp": mlp_shapes,
    "wide": lambda: mlp_shapes(WIDE),
    "resnet50": resnet50_shapes,
    "transformer": transformer_shapes,
}
