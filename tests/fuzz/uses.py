"""Steps that use their gradients, as a user writes them; `arithmetic` has the same in NumPy."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

GLOBAL_NORM, NORM, VALUE = 0.125, 0.0625, 0.03125  # limits of clips
UPHILL = 0.0625  # the length of the move of "sharp"
TINY = 1e-12
KEPT = 0.75  # of the average, for each step


class UsingStep(keras.Model):
    """Trains with a step that uses its gradients."""

    use = ""
    scales = False

    def train_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        variables = self.trainable_variables
        grads, loss, y_pred = self._gradients(x, y, sample_weight)
        if self.use == "sharp":
            scale = UPHILL / (tf.linalg.global_norm(grads) + TINY)
            moves = [scale * grad for grad in grads]
            for variable, move in zip(variables, moves, strict=True):
                variable.assign_add(move)
            grads, loss, y_pred = self._gradients(x, y, sample_weight)
            for variable, move in zip(variables, moves, strict=True):
                variable.assign_sub(move)
        self.optimizer.apply(self._changed(grads), variables)
        if self.use == "averages":
            for average, variable in zip(self.averages, variables, strict=True):
                average.assign(KEPT * average + (1 - KEPT) * variable)
        next(metric for metric in self.metrics if metric.name == "loss").update_state(loss)
        logs = self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return {**logs, "norm": tf.linalg.global_norm(grads)} if self.use == "logged norm" else logs

    def _gradients(self, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
            scaled = self.optimizer.scale_loss(loss) if self.scales else loss
        grads = tape.gradient(scaled, self.trainable_variables)
        if self.use == "averages":
            return grads, loss, y_pred
        # TensorFlow takes norms of a table's rows before it sums those of one word.
        return [tf.convert_to_tensor(grad) for grad in grads], loss, y_pred

    def _changed(self, grads: Any) -> Any:
        changes = {
            "global norm": lambda: tf.clip_by_global_norm(grads, GLOBAL_NORM)[0],
            "norm": lambda: [tf.clip_by_norm(grad, NORM) for grad in grads],
            "value": lambda: [tf.clip_by_value(grad, -VALUE, VALUE) for grad in grads],
            "sign": lambda: [tf.sign(grad) for grad in grads],
        }
        return changes.get(self.use, lambda: grads)()


def of_class(kind: type[keras.Model], use: str) -> type[keras.Model]:
    """Returns a subclass of `kind` with a step that uses its gradients."""
    return type("Using", (UsingStep, kind), {"use": use, "scales": kind.scales})


def add_averages(model: keras.Model) -> None:
    """Adds a variable for the average of each weight, which begins at 0."""
    model.averages = [
        keras.Variable(tf.zeros(each.shape, each.dtype), trainable=False, name=f"average_{index}")
        for index, each in enumerate(model.trainable_variables)
    ]
