"""Updates of variables on the parameter servers that hold them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_internals
from tfdist.gradients.update import deduplicate_rows_before_update


def update_on_servers(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the arithmetic of updates run on the server of each variable, so that only the gradient travels. In place.

    `assign_add` and `assign_sub` are atomic there; an `assign` of a value computed from the old one (SGD's momentum) is
    not, and of two at once the later one holds.
    """
    if keras_internals.has_replaced_variable_update(optimizer):
        return
    deduplicate_rows_before_update(optimizer)
    update_step, weight_decay = keras_internals.variable_update_methods(optimizer)

    def on_server(gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        with tf.device(variable.device):
            update_step(gradient, variable, learning_rate)

    def decay(variables: Any) -> None:
        for variable in variables:
            with tf.device(getattr(variable, "value", variable).device):
                weight_decay([variable])

    keras_internals.replace_variable_update(optimizer, on_server, decay)
