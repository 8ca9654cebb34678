"""Keras variables of which this process holds a piece, and the slots that an optimizer has for them.

A variable has the shape of the whole value for layers and files. Its `piece` is an ordinary Keras variable with this process's elements,
which optimizers update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeGuard

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import stateless_scope


class Holder(Protocol):
    """Converts between whole values and this process's piece, for one layout."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""

    @property
    def copies(self) -> int:
        """The number of processes of a group that hold the same piece."""

    @property
    def stored_at(self) -> tuple[int, ...] | None:
        """The begin of the piece in the whole value, on the first process that holds it; None on the others, which do not store it."""

    @property
    def axis(self) -> int | None:
        """The dimension that is split in one part for each process of the group, if no other one is split; else None."""

    def join(self, piece: tf.Tensor) -> tf.Tensor:
        """Returns the whole value. A collective."""

    def cut(self, whole: tf.Tensor) -> tf.Tensor:
        """Returns this process's piece of a whole value."""

    def read(self, variable: tf.Variable) -> tf.Tensor:
        """Returns the whole value of the variable with the piece. A collective, at the first read in a step."""

    def write(self, variable: tf.Variable, whole: tf.Tensor) -> None:
        """Assigns this process's piece of a whole value."""


class LaidOutVariable(keras.Variable):
    """A variable of which this process holds a piece. The first read of its value in a step is a collective, and each read outside of steps.

    Attributes:
        holder: Its `Holder`.
        read: Returns the whole value, while all processes take part in a save; else None.
    """

    holder: Holder
    read: Callable[[Any], np.ndarray] | None = None
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
        return self.value.numpy() if self.read is None else self.read(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def _direct_assign(self, value: Any) -> None:
        self.holder.write(self._value, value)


class LaidOutSlot(keras.Variable):
    """A slot of an optimizer for the piece of a variable: a piece for updates, and the whole slot for files."""

    holder: Holder
    read: Callable[[Any], np.ndarray] | None = None

    def numpy(self) -> Any:
        """Returns the whole slot. A collective."""
        return joined(self) if self.read is None else self.read(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any) -> Any:
        value = tf.convert_to_tensor(value, self._value.dtype)
        if tuple(value.shape) == self.holder.shape and value.shape != self._value.shape:
            value = self.holder.cut(value)
        return super().assign(value)


def lay_out(variable: keras.Variable, holder: Holder) -> None:
    """Makes a variable that is being created a `LaidOutVariable`; its tf.Variable will have the shape of the piece."""
    variable.__class__ = LaidOutVariable
    variable.holder = holder


def lay_out_slots(slots: Iterable[tuple[keras.Variable, keras.Variable]], variables: Iterable[keras.Variable]) -> None:
    """Makes the slots of the pieces of `variables` `LaidOutSlot`s; `slots` are pairs of a piece and a slot."""
    holders = {id(variable.piece): variable.holder for variable in variables if is_laid_out(variable)}
    for piece, slot in slots:
        if id(piece) in holders:
            slot.__class__ = LaidOutSlot
            slot.holder = holders[id(piece)]


def copies(variable: Any) -> int:
    """Returns the number of processes of a group that hold the same piece of a variable, or of a piece of one; 0 if each holds the whole."""
    holder = getattr(variable, "holder", None)
    return holder.copies if holder else 0


def is_laid_out(variable: object) -> TypeGuard[LaidOutVariable | LaidOutSlot]:
    """Returns whether this process holds a piece of a variable or slot."""
    return isinstance(variable, (LaidOutVariable, LaidOutSlot))


def joined(variable: LaidOutVariable | LaidOutSlot) -> np.ndarray:
    """Returns the whole value of a variable or slot. A collective."""
    whole: np.ndarray = variable.holder.join(variable._value.read_value()).numpy()
    return whole


def pieces(variables: Iterable[Any]) -> list[Any]:
    """Returns the variables that an optimizer updates: the pieces of laid-out variables, and the others."""
    return [variable.piece if isinstance(variable, LaidOutVariable) else variable for variable in variables]
