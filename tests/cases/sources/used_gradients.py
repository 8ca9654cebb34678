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


def trained(world, kind, momentum=0.0, epochs=1, rate=RATE, optimizer=None, data=(X, Y), **compiled):
    """Returns the weight, which begins at 1, and the last logs. `optimizer` makes another optimizer than SGD."""
    with world.scope():
        entry = keras.Input((1,))
        model = kind(entry, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(entry))
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(rate, momentum), **compiled)
    history = model.fit(*data, 4, epochs, shuffle=False, verbose=0).history
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


@case(
    SERVERS,
    full=True,
    error=r"used_gradients\.py:\d+: a gradient with respect to .*/kernel after the step has assigned it",
)
def a_gradient_at_moved_weights_on_servers(world):
    trained(world, Sharp)


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


class Adversarial(keras.Model):
    """A GAN of two weights: the discriminator's gradient is clipped."""

    def __init__(self):
        super().__init__()
        self.generator = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.discriminator = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.generator_optimizer = keras.optimizers.SGD(RATE)
        self.discriminator_optimizer = keras.optimizers.SGD(RATE)

    def build(self, shape):
        self.generator.build(shape)
        self.discriminator.build(shape)

    def call(self, noise):
        return self.discriminator(self.generator(noise))

    def train_step(self, data):
        noise, real = data
        variables = self.discriminator.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.discriminator(real) - 1) ** 2 + self(noise) ** 2)
        clipped = [tf.clip_by_norm(grad, 1.0) for grad in tape.gradient(loss, variables)]
        self.discriminator_optimizer.apply(clipped, variables)
        variables = self.generator.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(noise) - 1) ** 2)
        self.generator_optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@case(MIRRORED, WORKERS, full=True)
def a_discriminator_clips_its_gradient(world):
    with world.scope():
        model = Adversarial()
        model.build((None, 1))
        model.compile(loss="mse")
        model.generator_optimizer.build(model.generator.trainable_variables)
        model.discriminator_optimizer.build(model.discriminator.trainable_variables)
    model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    generator = discriminator = 1.0
    for _ in range(3):
        slope = np.mean(2 * (discriminator * Y - 1) * Y + 2 * discriminator * (generator * X) ** 2)
        discriminator -= RATE * np.clip(slope, -1, 1)
        generator -= RATE * np.mean(2 * (discriminator * generator * X - 1) * discriminator * X)
    found = [float(layer.kernel.numpy()[0, 0]) for layer in (model.generator, model.discriminator)]
    return {"weights": (found, [generator, discriminator])}


class Penalty(Step):
    """A step that clips the gradient of a loss with a gradient penalty, which is one with respect to inputs."""

    def _gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = self(x, training=True) ** 2
            loss = tf.reduce_mean((out - y) ** 2) + tf.reduce_mean((inner.gradient(out, x) - 1) ** 2)
        return tape.gradient(loss, self.trainable_variables), loss


def penalized(w):
    """Returns the gradient of the loss of `Penalty`: the output is (wx)^2, and its slope along x is 2w^2x."""
    return float(np.mean(4 * (w**2 * X**2 - Y) * w * X**2 + 8 * (2 * w**2 * X - 1) * w * X))


@case(MIRRORED, WORKERS, full=True)
def a_step_clips_the_gradient_of_a_loss_with_a_gradient_penalty(world):
    class Clipped(Penalty):
        change = staticmethod(lambda grads: tf.clip_by_global_norm(grads, 2.0)[0])

    rate, w = 1e-5, 1.0
    for _ in range(3):
        w -= rate * penalized(w)
    unclipped = trained(world, Penalty, epochs=3, rate=rate)[0]
    return {"clipped": (trained(world, Clipped)[0], 1 - RATE * 2), "unclipped": (unclipped, w)}


class FastSign(Step):
    """A step that trains on inputs which it has moved along the sign of their gradient (FGSM)."""

    def _gradients(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        return super()._gradients((x + 0.25 * tf.sign(tape.gradient(loss, x)), y))


@case(MIRRORED, WORKERS, full=True)
def a_step_moves_inputs_along_the_sign_of_their_gradient(world):
    class Clipped(FastSign):
        change = staticmethod(lambda grads: [tf.clip_by_value(grads[0], -20.0, 20.0)])

    w = clipped = 1.0
    for _ in range(3):
        w -= RATE * gradient(w, X + 0.25 * np.sign((w * X - Y) * w))
        slope = gradient(clipped, X + 0.25 * np.sign((clipped * X - Y) * clipped))
        clipped -= RATE * np.clip(slope, -20, 20)
    found = {kind.__name__: trained(world, kind, epochs=3)[0] for kind in (FastSign, Clipped)}
    return {"weights": (found, {"FastSign": w, "Clipped": clipped})}


@case(MIRRORED, WORKERS, full=True)
def clipped_rows_of_a_table(world):
    """TensorFlow's clips take the rows of a table one by one, also those of one word."""
    words, targets = np.array([[0], [1], [2], [1]], "int32"), np.array([[1], [2], [3], [-5]], "float32")
    with world.scope():
        entry = keras.Input((1,), dtype="int32")
        rows = keras.layers.Embedding(3, 1, embeddings_initializer="ones")(entry)
        model = changed(clip)(entry, keras.layers.Flatten()(rows))
        model.compile(keras.optimizers.SGD(RATE))
    model.fit(words, targets, batch_size=4, epochs=2, shuffle=False, verbose=0)
    table = np.ones((3, 1))
    for _ in range(2):
        each = 2 * (table[words[:, 0]] - targets) / 4
        np.subtract.at(table, words[:, 0], RATE * each / max(1, np.linalg.norm(each)))
    return {"table": (model.get_weights()[0], table)}
