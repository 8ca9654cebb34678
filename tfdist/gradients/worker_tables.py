"""Gradients of tables: of the rows that each worker holds, which are summed over all replicas already (`layers/worker_rows.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras

from tfdist.aliases import Gradient, Variables
from tfdist.compat import model_features
from tfdist.config import relations
from tfdist.layers.table import is_own


def own_indices(grads: Sequence[Gradient], variables: Variables) -> list[int]:
    """Returns the indices of the gradients of this worker's rows."""
    pairs = zip(grads, variables, strict=True)
    return [index for index, (grad, variable) in enumerate(pairs) if grad is not None and is_own(variable)]


def shared_indices(variables: Variables) -> list[int]:
    """Returns the indices of the variables that all workers hold."""
    return [index for index, variable in enumerate(variables) if not is_own(variable)]


def map_others(
    function: Callable[[list[Gradient]], Sequence[Gradient]], grads: Sequence[Gradient], variables: Variables
) -> list[Gradient]:
    """Applies a function to the gradients without those of this worker's rows, which are None in its argument; returns all."""
    own = own_indices(grads, variables)
    others = [None if index in own else grad for index, grad in enumerate(grads)]
    mapped = list(function(others))
    for index in own:
        mapped[index] = grads[index]
    return mapped


def check(optimizer: keras.optimizers.Optimizer, clips_local: bool) -> None:
    """Raises ConfigError if an optimizer needs more of a table than this worker's rows. `clips_local`: each replica clips before the sum."""
    asked = {"worker_table": "", **model_features.of_optimizer(optimizer)}
    if clips_local:
        asked["replica_clip"] = f"the optimizer {type(optimizer).__name__}, which clips the gradient of each replica"
    relations.check(asked, "worker_table")
