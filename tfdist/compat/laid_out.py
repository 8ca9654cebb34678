"""Keras variables of which this process holds a piece, and the slots that an optimizer has for them.

A variable has the shape of the whole value for layers and files. Its `piece` is an ordinary Keras variable with this process's elements,
which optimizers update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeGuard

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import stateless_scope

from tfdist.compat import keras_internals
from tfdist.compat.split_value import SplitValue, is_read_by_all
from tfdist.sharding.split import Split


class Holder(Protocol):
    """Converts between whole values and this process's piece, for one layout."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""

    @property
    def copies(self) -> int:
        """The number of processes of a group that hold the same piece."""

    @property
    def split(self) -> Split:
        """The elements that each process stores."""

    @property
    def rank(self) -> int:
        """The number of this process in `split`."""

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


class _LaidOut(SplitValue):
    """The parts of a value in a mesh, for variables and slots."""

    holder: Holder

    @property
    def split(self) -> Split:  # type: ignore[override]
        return self.holder.split

    @property
    def held(self) -> Sequence[int]:  # type: ignore[override]
        return (self.holder.rank,)

    def variables(self) -> Sequence[tf.Variable]:
        return (keras_internals.raw_value(self),)

    def _read_alone(self, chunk: np.ndarray, begin: int) -> None:
        """A collective of the processes of a group."""
        whole = self.holder.join(self.variables()[0].read_value())
        chunk[...] = whole[begin : begin + len(chunk)].numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)


class LaidOutVariable(_LaidOut, keras.Variable):
    """A variable of which this process holds a piece. The first read of its value in a step is a collective, and each read outside of steps.

    Attributes:
        holder: Its `Holder`.
    """

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


class LaidOutSlot(_LaidOut, keras.Variable):
    """A slot of an optimizer for the piece of a variable: a piece for updates, and the whole slot for files."""

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


def pieces(variables: Iterable[Any]) -> list[Any]:
    """Returns the variables that an optimizer updates: the pieces of laid-out variables, and the others."""
    return [variable.piece if isinstance(variable, LaidOutVariable) else variable for variable in variables]
