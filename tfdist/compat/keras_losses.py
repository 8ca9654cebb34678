"""Private names of Keras' losses; see `keras_internals.py`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.loss import apply_mask, reduce_weighted_values

from tfdist.aliases import Function, Structure
from tfdist.compat.keras_internals import layers
from tfdist.errors import ConfigError

__all__ = ["apply_mask"]  # with the functions and constants below

Method = Function
KERAS_ADDED_LOSSES = "_losses"
KERAS_ADDED_LOSS = "_aggregate_additional_loss"
KERAS_COMPILED_LOSS = "_compile_loss"
KERAS_LOSS_TRACKER = "_loss_tracker"
KERAS_LOSSES = "_flat_losses"
KERAS_GIVEN_LOSS = "_user_loss"
KERAS_LOSS_ARGUMENTS = "_fn_kwargs"
KERAS_CALL_LOSS = "_call_loss"  # since Keras 3.16
KERAS_MASK = "_keras_mask"


def added_loss_method(model: keras.Model) -> Method:
    """Returns the method with which a model sums one loss that a layer has added."""
    method: Method = getattr(model, KERAS_ADDED_LOSS)
    return method


def replaced_added_loss(model: keras.Model) -> Function:
    """Returns the function that `replace_added_loss` has set on a model, or None."""
    return vars(model).get(KERAS_ADDED_LOSS)


def replace_added_loss(model: keras.Model, new: Method) -> None:
    """Replaces the method with which a model sums one loss that a layer has added."""
    setattr(model, KERAS_ADDED_LOSS, new)


def compiled_loss(model: keras.Model) -> keras.losses.Loss:
    """Returns Keras' container of the losses that a model is compiled with, or None."""
    return getattr(model, KERAS_COMPILED_LOSS, None)


def only_loss(model: keras.Model) -> Any:
    """Returns the loss, a name, function or object, that a model is compiled with; None if there are none or several."""
    given = keras.tree.flatten(getattr(compiled_loss(model), KERAS_GIVEN_LOSS, None))
    return given[0] if len(given) == 1 else None


def arguments(loss: keras.losses.Loss) -> Mapping[str, Any]:
    """Returns the arguments that a loss of Keras passes to its function."""
    found: Mapping[str, Any] = getattr(loss, KERAS_LOSS_ARGUMENTS)
    return found


def losses(compiled: keras.losses.Loss) -> list[Structure]:
    """Returns the list in which a built container keeps its losses: named tuples with a field `loss`."""
    loss_objects: list[Any] = getattr(compiled, KERAS_LOSSES)
    return loss_objects


def keep_configuration_errors(compiled: keras.losses.Loss) -> None:
    """Makes a container raise the ConfigErrors of its losses unchanged. Keras 3.16 wraps each ValueError of a loss in another one."""
    call: Method | None = getattr(compiled, KERAS_CALL_LOSS, None)
    if call is None or KERAS_CALL_LOSS in vars(compiled):
        return

    def call_loss(*args: Any) -> tf.Tensor:
        try:
            return call(*args)
        except ValueError as e:
            if isinstance(e.__cause__, ConfigError):
                raise e.__cause__ from None
            raise

    setattr(compiled, KERAS_CALL_LOSS, call_loss)


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """Returns the metric that keeps the mean of a model's loss, or None."""
    return getattr(model, KERAS_LOSS_TRACKER, None)


def mask(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the mask that Keras keeps with a tensor, or None."""
    return getattr(tensor, KERAS_MASK, None)


def set_mask(tensor: tf.Tensor, value: tf.Tensor) -> None:
    """Sets the mask that Keras keeps with a tensor."""
    setattr(tensor, KERAS_MASK, value)


def loss_and_mask(
    loss: keras.losses.Loss, y_true: Structure, y_pred: Structure, sample_weight: Structure
) -> tuple[Structure, Structure]:
    """Returns the result of `Loss.__call__`, and the mask of predictions or values that selects the values that count, or None."""
    rows = tf.nest.map_structure(lambda y: keras.ops.convert_to_tensor(y, loss.dtype), (y_true, y_pred))
    values = loss.call(*rows)
    counted = mask(y_pred)
    mask_of_values = mask(values)
    if counted is None:
        counted = mask_of_values
    elif mask_of_values is not None:
        counted = counted & mask_of_values
    value = reduce_weighted_values(values, sample_weight, counted, loss.reduction, loss.dtype)
    return value, counted


def added_losses(layer: keras.layers.Layer) -> list[Structure]:
    """Returns the losses that a layer has added by `add_loss` in its last call, without regularizers and without sub-layers."""
    return list(layer._get_own_losses())


class _AddedLosses(threading.local):
    """A layer's losses, a list for each thread."""

    def __init__(self) -> None:
        self._own: list[Any] = []

    def __getitem__(self, index: Any) -> Any:
        return self._own[index]

    def extend(self, losses: Sequence[Structure]) -> None:
        self._own.extend(losses)

    def clear(self) -> None:
        self._own.clear()


def keep_added_losses_apart(model: keras.Model) -> None:
    """Makes a model's layers keep the losses that they add by `add_loss` for each thread.

    Replicas are threads that take turns at each collective: while one replica waits in its loss, the others call the same layers.
    """
    for layer in layers(model):
        if not isinstance(vars(layer)[KERAS_ADDED_LOSSES], _AddedLosses):
            vars(layer)[KERAS_ADDED_LOSSES] = _AddedLosses()
