"""An optimizer of Keras that updates some rows of a variable: a view of the user's optimizer in which slots are rows, too.

A release may move the private names of Keras here: tests/gradients/test_row_updates.py then fails.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras_internals import KERAS_TRAINABLE, KERAS_VARIABLES

_FIND_INDEX = "_get_variable_index"


class _Rows:
    """Some rows of a variable, which Keras reads and updates as if they were a variable.

    They have no memory of their own: a read gathers them, and an update scatters to them. An addition adds to the variable, so that on
    a parameter server it keeps what other workers add meanwhile.
    """

    def __init__(self, variable: tf.Variable, ids: tf.Tensor):
        self._variable = variable
        self._ids = ids
        self.dtype = variable.dtype

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the rows."""
        self._variable.scatter_update(tf.IndexedSlices(value, self._ids))

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the rows."""
        self._variable.scatter_add(tf.IndexedSlices(value, self._ids))

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the rows."""
        self._variable.scatter_sub(tf.IndexedSlices(value, self._ids))

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.gather(self._variable, self._ids)

    def __sub__(self, other: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(self) - other

    def __mul__(self, other: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(self) * other

    def __rmul__(self, other: Any) -> tf.Tensor:
        return other * tf.convert_to_tensor(self)


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
    # Without the constructor, which would create variables.
    view = object.__new__(type(optimizer))
    attributes = vars(view)
    attributes.update(vars(optimizer))
    count = len(attributes[KERAS_TRAINABLE])
    for name, values in vars(optimizer).items():
        is_list = isinstance(values, list) and len(values) == count and name not in (KERAS_TRAINABLE, KERAS_VARIABLES)
        if is_list and isinstance(values[index], keras.Variable):
            attributes[name] = {index: _Rows(values[index].value, gradient.indices)}
    attributes[_FIND_INDEX] = lambda rows: index
    type(optimizer).update_step(view, gradient.values, _Rows(variable, gradient.indices), learning_rate)
