"""Updates of variables that live as pieces (`strategies/mesh.py`): the optimizer is built on the pieces, and so are its slots."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Variables
from tfdist.compat import keras_internals, laid_out, model_features
from tfdist.compat.piece_optimizer import PieceOptimizer
from tfdist.compat.split_value import is_split
from tfdist.config import relations
from tfdist.feature import Feature
from tfdist.runtime.log import logger
from tfdist.strategy import Strategy

_UPDATES_PIECES = "updates_pieces"  # an attribute of optimizers


class ModelParallel(Feature):
    """The weights of a mesh of workers: optimizers update this worker's pieces."""

    after = ("gradient_sums",)
    splits_state = True

    @classmethod
    def asks(cls, strategy: Strategy) -> bool:
        return strategy.mesh is not None

    def needs_update(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> bool:
        return True

    def attach(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> None:
        update_pieces(optimizer, self.strategy)

    def sum_over_pieces(self, value: tf.Tensor) -> tf.Tensor:
        summed: tf.Tensor = self.strategy.mesh.sum_in_group(value)
        return summed


def update_pieces(optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> None:
    """Makes a distributed optimizer update the pieces of laid-out variables, in place.

    Raises:
        ConfigError: The optimizer needs whole variables, or has an option that does not work with pieces.
    """
    if hasattr(optimizer, _UPDATES_PIECES):
        return
    asked = {"mesh": "", **model_features.of_optimizer(optimizer)}
    if optimizer.built:
        asked["built_optimizer"] = f"the optimizer {type(optimizer).__name__}, which was built before"
    relations.check(asked, "mesh")
    keras_build = optimizer.build
    keras_finalize = optimizer.finalize_variable_values
    setattr(optimizer, _UPDATES_PIECES, True)
    PieceOptimizer(optimizer, lambda piece: getattr(piece, "holder", None))

    def build(variables: Variables) -> None:
        keras_build(laid_out.pieces(variables))
        if strategy.mesh.rank == 0:
            strategy.mesh.warn_of_unmatched(variables[0].path)
            own, whole = _bytes([*variables, *optimizer.variables])
            shape = " x ".join(map(str, strategy.mesh.grid.sizes))
            logger.info(
                f"weights and optimizer state: {own / 1e6:.3g} MB on each of {strategy.mesh.grid.ranks} workers instead of "
                f"{whole / 1e6:.3g} ({shape} mesh)."
            )

    optimizer.build = build
    optimizer.finalize_variable_values = lambda variables: keras_finalize(laid_out.pieces(variables))


def _bytes(variables: Variables) -> tuple[int, int]:
    """Returns the bytes of variables on this worker, and those of the whole values."""
    own = 0
    whole = 0
    for variable in variables:
        value = keras_internals.raw_value(variable)
        shape = variable.split.shape if is_split(variable) else value.shape
        own += value.shape.num_elements() * value.dtype.size
        whole += tf.TensorShape(shape).num_elements() * value.dtype.size
    return own, whole
