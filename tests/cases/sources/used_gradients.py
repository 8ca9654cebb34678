"""Steps that use the gradients of their tapes before they apply them: clips, signs, norms, moved weights."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, SERVERS, TWO_EACH, WORKERS
from tests.cases.case import case

X = np.array([[1], [1], [1], [10]], "float32")
Y = np.array([[0], [0], [0], [20]], "float32")
RATE = 0.01  # the batch's gradient is -48.5; those of two replicas are 2 and -99


class Step(keras.Model):
    """A step that applies its gradients after `change`."""

    change = staticmethod(lambda grads: grads)

    def _gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        return tape.gradient(loss, self.trainable_variables), loss

    def train_step(self, data):
        grads, loss = self._gradients(data)
        self.optimizer.apply_gradients(zip(self.change(grads), self.trainable_variables, strict=True))
        return {"loss": loss}


class Norm(Step):
    """A step that logs the norm of its gradients."""

    def train_step(self, data):
        grads, _ = self._gradients(data)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"norm": tf.linalg.global_norm(grads)}


class Sharp(Step):
    """Sharpness-aware minimization: takes the gradient at weights that it moves uphill."""

    def train_step(self, data):
        grads, _ = self._gradients(data)
        scale = 0.05 / tf.linalg.global_norm(grads)
        for variable, grad in zip(self.trainable_variables, grads, strict=True):
            variable.assign_add(scale * grad)
        uphill, loss = self._gradients(data)
        for variable, grad in zip(self.trainable_variables, grads, strict=True):
            variable.assign_sub(scale * grad)
        self.optimizer.apply_gradients(zip(uphill, self.trainable_variables, strict=True))
        return {"uphill": loss}


def changed(function):
    class Changed(Step):
        change = staticmethod(function)

    return Changed


def trained(world, kind, momentum=0.0, epochs=1, rate=RATE, **compiled):
    """Returns the weight, which begins at 1, and the last logs."""
    with world.scope():
        entry = keras.Input((1,))
        model = kind(entry, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(entry))
        model.compile(keras.optimizers.SGD(rate, momentum), **compiled)
    history = model.fit(X, Y, 4, epochs, shuffle=False, verbose=0).history
    return float(model.get_weights()[0][0, 0]), {key: values[-1] for key, values in history.items()}


def gradient(w, x=X, y=Y):
    return float(np.mean(2 * (w * x - y) * x))


def clip(grads):
    return tf.clip_by_global_norm(grads, 1.0)[0]


@case(MIRRORED, WORKERS, TWO_EACH, SERVERS, full=(TWO_EACH, SERVERS))
def a_step_clips_signs_logs_and_moves(world):
    clipped = trained(world, changed(clip))[0]
    signed = trained(world, changed(lambda g: [tf.sign(v) for v in g]), rate=0.001)[0]
    values = trained(world, changed(lambda g: [tf.clip_by_value(v, -3.0, 3.0) for v in g]))[0]
    same, norm = trained(world, Norm)
    return {
        "clip": (clipped, 1.01),
        "sign": (signed, 1.001),
        "value": (values, 1.03),
        "norm": (norm["norm"], 48.5),
        "weight of logged": (same, 1 - RATE * gradient(1.0)),
    }


@case(MIRRORED, WORKERS, full=())
def a_step_takes_the_gradient_at_moved_weights(world):
    w = 1.0
    for _ in range(3):
        moved = w + 0.05 * np.sign(gradient(w))
        w -= RATE * gradient(moved)
    loss = np.mean((moved * X - Y) ** 2)
    found, logs = trained(world, Sharp, epochs=3)
    return {"weight": (found, w), "loss": (logs["uphill"], loss)}


@case(full=True)
def eager_and_repeated_steps_clip_as_others(world):
    eager = trained(world, changed(clip), run_eagerly=True)[0]
    repeated = trained(world, changed(clip), momentum=0.9, epochs=2)[0]
    return {"eager": (eager, 1.01), "momentum": (repeated, 1 + 0.01 + 0.019)}


@case(full=True)
def a_step_that_changes_nothing_is_as_before(world):
    return {"weight": (trained(world, Step)[0], 1 - RATE * gradient(1.0))}


def reduced(op, first=lambda grad: grad, last=lambda grad: grad):
    def reduce(grads):
        context = tf.distribute.get_replica_context()
        return [last(context.all_reduce(op, first(grad))) for grad in grads]

    return changed(reduce)


@case(full=True)
def a_mean_by_hand_counts_once(world):
    right = 1 - RATE * gradient(1.0)
    return {
        "mean": (trained(world, reduced("MEAN"))[0], right),
        "mean of a clip": (trained(world, reduced("MEAN", lambda g: tf.clip_by_norm(g, 1.0)))[0], 1.01),
        "clip of a mean": (trained(world, reduced("MEAN", last=lambda g: tf.clip_by_norm(g, 1.0)))[0], 1.01),
    }


@case(
    error=r"used_gradients\.py:\d+: the step sums gradients that it applies .*all_reduce\(SUM\).*twice.*Remove", full=()
)
def a_sum_by_hand_that_is_applied_is_rejected(world):
    trained(world, reduced(tf.distribute.ReduceOp.SUM))


@case(
    error=r"used_gradients\.py:\d+: the step sums values that it computes from its gradients .*twice.*Remove", full=True
)
def a_sum_by_hand_of_changed_gradients_is_rejected(world):
    trained(world, reduced(tf.distribute.ReduceOp.SUM, lambda g: g / 2))


class Nested(Step):
    """A step whose loss contains the norm of a gradient with respect to the weights."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            loss += 1e-3 * tf.norm(inner.gradient(loss, self.trainable_variables)[0])
        grads = outer.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": loss}


@case(warning=r"used_gradients\.py:\d+: a tape within another tape, .*each replica's own examples.*kernel", full=())
def a_nested_tape_over_weights_gets_a_warning(world):
    return {"is finite": (np.isfinite(trained(world, Nested)[0]), True)}
