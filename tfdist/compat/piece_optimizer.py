"""Keras' own optimizer on pieces of variables: its slots have the shapes of the pieces, and the formula of its class updates them.

A release may move the private names of Keras and TensorFlow here: tests/multiprocess/test_sharded.py and tests/gradients/test_row_updates.py then
fail.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.distribute import distribute_lib

from tfdist.compat import keras_internals
from tfdist.compat.keras_internals import GRADIENT_ACCUMULATOR, KERAS_TRAINABLE, KERAS_VARIABLES
from tfdist.compat.split_value import Holder, SplitSlot, become, must_save_together
from tfdist.sharding.split import Index, Split, view

_MASTERS = "_masters"  # the attribute of an optimizer with the masters of its pieces
_AVERAGES = "_model_variables_moving_average"
_FIND_INDEX = "_get_variable_index"


class _Elements:
    """Some elements of a variable, which Keras reads and updates as if they were a variable."""

    dtype: tf.DType

    def _read(self) -> tf.Tensor:
        raise NotImplementedError

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return self._read()

    def __sub__(self, other: tf.Tensor) -> tf.Tensor:
        return self._read() - other

    def __mul__(self, other: tf.Tensor) -> tf.Tensor:
        return self._read() * other

    def __rmul__(self, other: Any) -> tf.Tensor:
        return other * self._read()


class Piece(_Elements):
    """The elements of a model's variable that this process updates: a range of the flat value.

    Without a master the elements have no memory of their own: they are read from the variable before an update, and written to it
    afterwards.

    Attributes:
        variable: The model's variable.
        split: The elements that each process holds.
        rank: The number of this process.
        index: The index of this process's elements.
        elements: The number of elements.
        value: Their current values during an update.
        master: The variable with their values of float32 between two updates, if the model's variable has rounded ones; else None.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, variable: keras.Variable, split: Split, process: int):
        index = split.indices[process]
        assert index is not None  # noqa: S101 (for the type checker)
        self.variable = variable
        self.split = split
        self.rank = process
        self.index: Index = index
        self.elements = split.size(process)
        self.value: tf.Tensor = None
        self.master: SplitSlot | None = None
        # What Keras reads of a variable. By its key the optimizer finds what belongs to the model's variable.
        self.path = variable.path
        self.name = variable.value.name
        self.shape = (self.elements,)
        self.dtype = tf.as_dtype(variable.dtype)
        self._unique_id = keras_internals.variable_key(optimizer, variable)

    def _read(self) -> tf.Tensor:
        return self.value

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the values."""
        self.value = value

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the values."""
        self.value += value

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the values."""
        self.value -= value

    def join(self, piece: tf.Tensor) -> tf.Tensor:
        """Returns the whole value of a slot, if this process holds all of it."""
        if len(self.split.indices) > 1:
            raise must_save_together(f"Each worker holds a part of the optimizer's state of {self.path}")
        return tf.reshape(piece, self.split.shape or [1])


class _Rows(_Elements):
    """Some rows of a variable. A read gathers them, and an update scatters to them.

    An addition adds to the variable, so that on a parameter server it keeps what other workers add meanwhile.
    """

    def __init__(self, variable: tf.Variable, ids: tf.Tensor):
        self._variable = variable
        self._ids = ids
        self.dtype = variable.dtype

    def _read(self) -> tf.Tensor:
        return tf.gather(self._variable, self._ids)

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the rows."""
        self._variable.scatter_update(tf.IndexedSlices(value, self._ids))

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the rows."""
        self._variable.scatter_add(tf.IndexedSlices(value, self._ids))

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the rows."""
        self._variable.scatter_sub(tf.IndexedSlices(value, self._ids))


class PieceOptimizer:
    """The user's optimizer, whose slots are `SplitSlot`s of this process's pieces of variables.

    Args:
        optimizer: The optimizer, which is changed in place.
        holder_of: Returns the `Holder` of a variable that the optimizer is built with, or None for a variable that is whole.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, holder_of: Callable[[Any], Holder | None]):
        self._optimizer = optimizer
        self._holder_of = holder_of
        self._add = optimizer.add_variable_from_reference
        optimizer.add_variable_from_reference = self._add_slot

    def _add_slot(self, reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> keras.Variable:
        holder = self._holder_of(reference_variable)
        if isinstance(holder, Piece) and name == GRADIENT_ACCUMULATOR:
            holder = None  # each replica adds up whole gradients
        if isinstance(holder, Piece):
            slot = _outside(BaseOptimizer.add_variable_from_reference, self._optimizer, holder, name, initializer)
        else:
            slot = self._add(reference_variable, name, initializer)
        return become(slot, SplitSlot, holder) if holder else slot

    def split(self) -> None:
        """Replaces the slots of an optimizer that is built already, such as one of a loaded model, by pieces of them."""
        for variable, _, slot in list(keras_internals.slots(self._optimizer)):
            holder = self._holder_of(variable)
            if holder is not None and not slot.name.endswith(GRADIENT_ACCUMULATOR):
                piece = view(np.ascontiguousarray(slot.numpy()), holder.index)
                keras_internals.replace_value(slot, _outside(tf.Variable, piece, trainable=False))
                become(slot, SplitSlot, holder)

    def add_masters(self, pieces: Sequence[Piece]) -> None:
        """Gives pieces of float32 masters, which `state_variables` of the optimizer then contains."""
        masters = []
        for piece in pieces:
            if piece.dtype == tf.float32:
                master = _outside(keras.Variable, "zeros", piece.shape, trainable=False, name="master")
                master._path = f"{piece.path}_master"
                piece.master = become(master, SplitSlot, piece)
                masters.append(piece.master)
        vars(self._optimizer)[_MASTERS] = masters  # not an attribute that Keras tracks: files do not hold them

    @property
    def slots(self) -> list[SplitSlot]:
        """The slots of pieces."""
        return [variable for variable in self._optimizer.variables if isinstance(variable, SplitSlot)]

    @property
    def averages(self) -> list[tf.Variable]:
        """The moving averages of all pieces."""
        return [average.value for average in getattr(self._optimizer, _AVERAGES)]

    def update(self, grads: Sequence[tf.Tensor], pieces: Sequence[Piece]) -> None:
        """Decays and updates pieces as Keras does, in cross-replica context."""
        optimizer = self._optimizer
        optimizer._distributed_tf_update_step = self._update_each
        with _outside_replicas():
            BaseOptimizer._apply_weight_decay(optimizer, pieces)
            type(optimizer)._backend_update_step(optimizer, grads, pieces, optimizer.learning_rate)

    def _update_each(self, strategy: Any, pairs: Sequence[tuple[tf.Tensor, Piece]], learning_rate: tf.Tensor) -> None:
        for grad, piece in pairs:
            self._optimizer.update_step(grad, piece, learning_rate)

    def move_averages(self, pieces: Sequence[Piece]) -> None:
        """Updates the moving averages of all pieces as Keras does, in cross-replica context."""
        with _outside_replicas():
            keras_internals.moving_average_method(self._optimizer)(pieces)


@contextlib.contextmanager
def _outside_replicas() -> Iterator[None]:
    """Lets Keras update slots that belong to no strategy."""
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def _outside(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns a variable that belongs to no strategy and no graph: a new thread is outside of all scopes of TensorFlow and Keras."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(create, *args, **kwargs).result()


def state_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the state of an optimizer: its variables, and the float32 values of weights that the model has rounded."""
    leaf = getattr(optimizer, "inner_optimizer", optimizer)
    return [*optimizer.variables, *vars(leaf).get(_MASTERS, ())]


def variable_of(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> keras.Variable:
    """Returns Keras' variable of TensorFlow's, which an optimizer updates."""
    return getattr(optimizer, KERAS_TRAINABLE)[getattr(optimizer, _FIND_INDEX)(variable)]


def update_rows(
    optimizer: keras.optimizers.Optimizer,
    gradient: tf.IndexedSlices,
    variable: tf.Variable,
    learning_rate: keras.Variable | float,
) -> None:
    """Updates the rows of a variable that a gradient has, and the same rows of its slots, as the optimizer's class updates a variable.

    The optimizer must update each element independently, and the gradient must have each row once.
    """
    index = getattr(optimizer, _FIND_INDEX)(variable)
    # A view of the optimizer, in which slots are rows, too. Without the constructor, which would create variables.
    rows = object.__new__(type(optimizer))
    attributes = vars(rows)
    attributes.update(vars(optimizer))
    count = len(attributes[KERAS_TRAINABLE])
    for name, values in vars(optimizer).items():
        is_list = isinstance(values, list) and len(values) == count and name not in (KERAS_TRAINABLE, KERAS_VARIABLES)
        if is_list and isinstance(values[index], keras.Variable):
            attributes[name] = {index: _Rows(values[index].value, gradient.indices)}
    attributes[_FIND_INDEX] = lambda _: index
    type(optimizer).update_step(rows, gradient.values, _Rows(variable, gradient.indices), learning_rate)
