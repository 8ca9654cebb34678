"""Updates of variables that live as pieces (`strategies/mesh.py`): the optimizer is built on the pieces, and so are its slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.collectives.communicator import Communicator
from tfdist.compat import keras_internals, laid_out, model_features
from tfdist.config import relations
from tfdist.feature import Feature
from tfdist.gradients import gradient_lists
from tfdist.runtime.log import logger
from tfdist.strategy import Strategy


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
    update: Any = keras_internals.update_method(optimizer)
    if isinstance(getattr(update, "clip_pieces", None), _Clip):
        return
    asked = {"mesh": "", **model_features.of_optimizer(optimizer)}
    if optimizer.built:
        asked["built_optimizer"] = f"the optimizer {type(optimizer).__name__}, which was built before"
    relations.check(asked, "mesh")
    keras_build = optimizer.build
    keras_finalize = optimizer.finalize_variable_values
    clip = _Clip(optimizer, strategy.mesh.group)
    update.clip_pieces = clip

    def build(variables: Variables) -> None:
        keras_build(laid_out.pieces(variables))
        slots = [(piece, slot) for piece, _, slot in keras_internals.slots(optimizer)]
        laid_out.lay_out_slots(slots, variables)
        clip.copies = {id(each.piece): each.holder.copies for each in variables if laid_out.is_laid_out(each)}
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
        shape = variable.holder.shape if laid_out.is_laid_out(variable) else value.shape
        own += value.shape.num_elements() * value.dtype.size
        whole += tf.TensorShape(shape).num_elements() * value.dtype.size
    return own, whole


class _Clip:
    """The clipping of gradients by norms, to which the pieces of all workers of a model group contribute.

    Attributes:
        copies: The number of workers with the same piece, by the id of the piece's variable.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, group: Communicator):
        self._optimizer = optimizer
        self._group = group
        self.copies: dict[int, int] = {}
        keras_internals.clip_unless(optimizer, lambda: bool(optimizer.clipnorm or optimizer.global_clipnorm))

    def __call__(self, grads: Sequence[Gradient], variables: Variables) -> Sequence[Gradient]:
        """Returns clipped gradients. A collective, if gradients are clipped by a norm."""
        each, total_norm = self._optimizer.clipnorm, self._optimizer.global_clipnorm
        if not (each or total_norm) or not grads:
            return grads
        squares = []
        for grad in grads:
            values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
            squares.append(tf.reduce_sum(tf.square(tf.cast(values, tf.float32))))
        held = [index for index, variable in enumerate(variables) if id(variable) in self.copies]
        if held:
            # A piece that several workers hold counts once.
            parts = [squares[index] / self.copies[id(variables[index])] for index in held]
            ((total,),) = self._group.all_reduce([[tf.stack(parts)]])
            for index, square in zip(held, tf.unstack(total), strict=True):
                squares[index] = square
        if each:
            factors = [each / tf.maximum(tf.sqrt(square), each) for square in squares]
        else:
            norm = tf.sqrt(tf.add_n(squares))
            factors = [total_norm * tf.minimum(1 / norm, 1 / total_norm) + (norm - norm)] * len(grads)
        return [gradient_lists.scale([grad], factor)[0] for grad, factor in zip(grads, factors, strict=True)]
