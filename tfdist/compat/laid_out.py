"""Keras variables of which this process holds a piece, by a layout.

A variable has the shape of the whole value for layers and files. Its `piece` is an ordinary Keras variable with this process's elements,
which optimizers update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeGuard

import keras
import tensorflow as tf
from keras.src.backend.common import stateless_scope

from tfdist.compat import split_value
from tfdist.compat.split_value import SplitVariable, is_read_by_all


class Holder(split_value.Holder, Protocol):
    """Converts between whole values and this process's piece, for one layout."""

    @property
    def copies(self) -> int:
        """The number of processes of a group that hold the same piece."""

    @property
    def axis(self) -> int | None:
        """The dimension that is split in one part for each process of the group, if no other one is split; else None."""

    def cut(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns this process's piece of a whole value."""

    def read(self, variable: tf.Variable) -> tf.Tensor:
        """Returns the whole value of the variable with the piece. A collective, at the first read in a step."""

    def write(self, variable: tf.Variable, whole: tf.Tensor) -> None:
        """Assigns this process's piece of a whole value."""


class LaidOutVariable(SplitVariable):
    """A variable of which this process holds a piece. The first read of its value in a step is a collective, and each read outside of steps."""

    holder: Holder
    _piece: keras.Variable | None = None

    @property
    def value(self) -> tf.Tensor:
        """The whole value."""
        if stateless_scope.in_stateless_scope():
            value = stateless_scope.get_stateless_scope().get_current_value(self)
            if value is not None:
                return self._maybe_autocast(value)
        return self._maybe_autocast(self.holder.read(self._value))

    @property
    def part(self) -> tf.Tensor:
        """The value of the piece, in the dtype of the layer that reads it."""
        return self._maybe_autocast(tf.convert_to_tensor(self._value))

    @property
    def handle(self) -> tf.Tensor:
        """The resource of the piece, of which tapes compute the gradient."""
        return self._value.handle

    @property
    def piece(self) -> keras.Variable:
        """The piece, as a variable with the same path."""
        if self._piece is None:
            piece = self._piece = keras.Variable(
                self._value, dtype=self._dtype, trainable=self.trainable, name=self.name
            )
            piece._path = self._path
            piece.holder = self.holder
            if self.constraint is not None:  # it may need the whole value, such as a norm
                piece._constraint = lambda _: self.holder.cut(self.constraint(self.value))
        return self._piece

    def numpy(self) -> Any:
        return super().numpy() if is_read_by_all(self) else self.value.numpy()

    def _direct_assign(self, value: Any) -> None:
        self.holder.write(self._value, value)


def copies(variable: Any) -> int:
    """Returns the number of processes of a group that hold the same piece of a variable, or of a piece of one; 0 if each holds the whole."""
    holder = getattr(variable, "holder", None)
    return holder.copies if holder else 0


def is_laid_out(variable: object) -> TypeGuard[LaidOutVariable]:
    """Returns whether this process holds a piece of a variable."""
    return isinstance(variable, LaidOutVariable)


def pieces(variables: Iterable[Any]) -> list[Any]:
    """Returns the variables that an optimizer updates: the pieces of laid-out variables, and the others."""
    return [variable.piece if isinstance(variable, LaidOutVariable) else variable for variable in variables]
