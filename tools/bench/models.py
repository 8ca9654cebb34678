"""The models whose gradients are sent."""

from __future__ import annotations

import itertools
from typing import Any

BATCH = 32  # examples per worker and step
MLP = (1024, 2048, 2048, 2048, 10)


def mlp(library: Any) -> Any:
    """Returns an MLP of 10.5 million parameters.

    Args:
        library: `keras` or `tf_keras`.
    """
    hidden = [library.layers.Dense(width, activation="relu") for width in MLP[1:-1]]
    return library.Sequential([library.Input((MLP[0],)), *hidden, library.layers.Dense(MLP[-1])])


def mlp_shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of its variables, in order."""
    return [shape for p, q in itertools.pairwise(MLP) for shape in ((p, q), (q,))]


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of ResNet-50's variables, 25.6 million parameters, in order."""
    import keras

    return [tuple(variable.shape) for variable in keras.applications.ResNet50(weights=None).trainable_variables]


def transformer_shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of a small transformer's variables, 5.2 million parameters, in order."""
    width, inner, words = 256, 1024, 8000
    layer = [(width, width), (width,)] * 4 + [(width,)] * 4 + [(width, inner), (inner,), (inner, width), (width,)]
    return [*layer * 4, (width, words), (words,)]


SHAPES = {"mlp": mlp_shapes, "resnet50": resnet50_shapes, "transformer": transformer_shapes}
