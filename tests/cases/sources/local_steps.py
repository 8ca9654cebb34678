"""`sync_every`: each worker trains alone between exchanges of weights."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.arms import WORKERS
from tests.cases.case import case
from tests.helpers.options import options_set
from tfdist.tasks import digits

rng = np.random.default_rng(1)
X = rng.normal(size=(27, 3)).astype("float32")
Y = (X @ [[1.0], [2.0], [-1.0]] + rng.normal(size=(27, 1))).astype("float32")
SIZE, EPOCHS = 8, 3  # the last of four batches has 2 and 1 examples


@contextlib.contextmanager
def local(world, every, outer=None, nan_policy="ignore", compression=None):
    strategy = world.trainer.strategy
    strategy.engine.nan_policy, world.trainer.compression = nan_policy, compression
    with options_set(strategy, sync_every=every, outer=outer or tfdist.Outer()):
        yield


def linear(world, make_optimizer, **compiled):
    with world.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(make_optimizer(0.05), "mse", **compiled)
    model.set_weights([np.full((3, 1), 0.5), np.zeros(1)])
    return model


def is_near(found, right):
    return max(np.abs(a - b).max() for a, b in zip(found, right, strict=True)) < 1e-6


class Adam:
    """Adam of one worker, in float64; only the corrections of the bias are in Keras' float32."""

    def __init__(self):
        self.moments, self.step = {}, 0

    def __call__(self, weights, gradients):
        self.step += 1
        first, second = (float(1 - np.power(np.float32(beta), np.float32(self.step))) for beta in (0.9, 0.999))
        for index, gradient in enumerate(gradients):
            m, v = self.moments.get(index, (0.0, 0.0))
            m, v = self.moments[index] = m + 0.1 * (gradient - m), v + 0.001 * (gradient**2 - v)
            weights[index] = weights[index] - 0.05 * np.sqrt(second) / first * m / (np.sqrt(v) + 1e-7)


def descend(weights, gradients):
    """SGD."""
    for index, gradient in enumerate(gradients):
        weights[index] = weights[index] - 0.05 * gradient


def diloco(optimizers, exchanges, rate, momentum, teacher=()):
    """Returns the weights of a plain loop: the anchor after each exchange, the last one at the end; `exchanges` are the steps after which there is one.

    With the weights of a teacher the student learns its outputs, too; the teacher follows the student, and exchanges average it.
    """
    anchor = [np.full((3, 1), 0.5), np.zeros(1), *teacher]
    velocity = [0.0, 0.0]
    own = [list(anchor) for _ in optimizers]
    anchors, examples = [], np.zeros(len(optimizers))
    steps = [range(begin, min(begin + SIZE, len(X))) for begin in range(0, len(X), SIZE)] * EPOCHS
    for number, rows in enumerate(steps, 1):
        for rank, part in enumerate(np.array_split(rows, len(optimizers))):
            x, y = X[part].astype("float64"), Y[part]
            w, b, *followers = own[rank]
            error = x @ w + b - y
            if followers:
                error += x @ (w - followers[0]) + b - followers[1]
            optimizers[rank](own[rank], [2 * x.T @ error / len(x), 2 * error.mean(0)])
            own[rank][2:] = [0.8 * e + 0.2 * w for e, w in zip(followers, own[rank], strict=False)]
            examples[rank] += len(part)
        if number not in exchanges:
            continue
        for index in range(len(anchor)):
            move = sum(
                share * (anchor[index] - w[index]) for share, w in zip(examples / examples.sum(), own, strict=True)
            )
            if index > 1:
                anchor[index] = anchor[index] - move
                continue
            velocity[index] = momentum * velocity[index] + move
            anchor[index] = anchor[index] - rate * (move + momentum * velocity[index])
        own = [list(anchor) for _ in optimizers]
        anchors.append(list(anchor))
        examples[:] = 0
    return anchors


class Seen(keras.callbacks.Callback):
    """The weights that a callback sees after each step."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights())


@case(WORKERS)
def diloco_of_adam(world):
    with local(world, 5, tfdist.Outer(learning_rate=0.7, momentum=0.9)):
        model = linear(world, keras.optimizers.Adam)
        model.fit(X, Y, batch_size=SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
    anchors = diloco([Adam() for _ in range(world.workers)], (5, 10, 12), 0.7, 0.9)
    return {"weights": (is_near(model.get_weights(), anchors[-1]), True)}


@case(WORKERS)
def an_accumulation_continues_past_an_epoch_on_each_worker(world):
    x, y = X[:20], Y[:20]  # three batches: an epoch ends amid an accumulation
    with local(world, 3):
        with world.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.05, gradient_accumulation_steps=2), "mse")
        model.set_weights([np.full((3, 1), 0.5), np.zeros(1)])
        model.fit(x, y, batch_size=SIZE, epochs=4, shuffle=False, verbose=0)
    anchor = [np.full((3, 1), 0.5), np.zeros(1)]
    optimizers = [Adam() for _ in range(world.workers)]
    own, held, examples = [list(anchor) for _ in optimizers], [None] * world.workers, np.zeros(world.workers)
    for number, rows in enumerate([range(begin, min(begin + SIZE, 20)) for begin in range(0, 20, SIZE)] * 4, 1):
        for rank, part in enumerate(np.array_split(rows, world.workers)):
            error = x[part].astype("float64") @ own[rank][0] + own[rank][1] - y[part]
            gradients = [2 * x[part].T @ error / len(part), 2 * error.mean(0)]
            examples[rank] += len(part)
            if number % 2:
                held[rank] = gradients
            else:
                optimizers[rank](own[rank], [(a + b) / 2 for a, b in zip(held[rank], gradients, strict=True)])
        if number % 6 == 0:
            shares = examples / examples.sum()
            anchor = [sum(s * w[index] for s, w in zip(shares, own, strict=True)) for index in range(2)]
            own, examples = [list(anchor) for _ in optimizers], np.zeros(world.workers)
    return {"weights": (is_near(model.get_weights(), anchor), True)}


@case(WORKERS)
def callbacks_and_validations_see_the_anchor(world):
    seen = Seen()
    with local(world, "2,4:5"):
        model = linear(world, keras.optimizers.SGD)
        how = {"batch_size": SIZE, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, epochs=EPOCHS, validation_data=(X, Y), callbacks=[seen], **how).history
    anchors = diloco([descend] * world.workers, (2, 4, 9, 12), 1.0, 0.0)
    start = [np.full((3, 1), 0.5), np.zeros(1)]
    right = [start, *[anchors[0]] * 2, *[anchors[1]] * 5, *[anchors[2]] * 3, anchors[2]]
    losses = [float(np.mean((X @ w + b - Y) ** 2)) for w, b in (right[3], right[7], right[11])]
    return {
        "seen": (all(is_near(a, b) for a, b in zip(seen.weights, right, strict=True)), True),
        "validations": (history["val_loss"], losses),
        "at the end": (is_near(model.get_weights(), anchors[-1]), True),
    }


class MeanTeacher(keras.Model):
    """A student and its teacher, whose weights each step moves towards the student's."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = (keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]) for _ in range(2))
        self.student.set_weights([np.full((3, 1), 0.5), np.zeros(1)])
        self.teacher.set_weights(TEACHER)

    def call(self, x):
        return self.teacher(x)

    def get_weights(self):
        return self.student.get_weights() + self.teacher.get_weights()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self.student(x)
            loss = tf.reduce_mean((outputs - y) ** 2) + tf.reduce_mean((outputs - self.teacher(x)) ** 2)
        variables = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        tf.cond(self.optimizer.iterations > 0, self.follow, lambda: None)
        return {"loss": loss}

    def follow(self):
        for e, w in zip(self.teacher.weights, self.student.weights, strict=True):
            e.assign(0.8 * e + 0.2 * w)


TEACHER = [np.full((3, 1), 0.25), np.ones(1)]


@case(WORKERS)
def weights_that_steps_assign_are_averaged_without_outer(world):
    pairs = {}
    anchors = diloco([Adam() for _ in range(world.workers)], (2, 4, 9, 12), 0.7, 0.9, TEACHER)
    losses = [float(np.mean((X @ anchors[n][2] + anchors[n][3] - Y) ** 2)) for n in (1, 1, 2)]
    for kind in ("left out", "frozen", "in the optimizer"):
        seen = Seen()
        with local(world, "2,4:5", tfdist.Outer(learning_rate=0.7, momentum=0.9)):
            with world.scope():
                model = MeanTeacher()
                model.compile(keras.optimizers.Adam(0.05), "mse")
                model.teacher.trainable = kind != "frozen"
                if kind == "in the optimizer":
                    model.optimizer.build(model.trainable_variables)
            how = {"batch_size": SIZE, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
            history = model.fit(X, Y, validation_data=(X, Y), callbacks=[seen], **how).history
        start = [np.full((3, 1), 0.5), np.zeros(1), *TEACHER]
        right = [start, *[anchors[0]] * 2, *[anchors[1]] * 5, *[anchors[2]] * 4]
        pairs |= {
            f"{kind}: seen": ([is_near(a, b) for a, b in zip(seen.weights, right, strict=True)], [True] * 12),
            f"{kind}: validations": (history["val_loss"], losses),
            f"{kind}: at the end": (is_near(model.get_weights(), anchors[3]), True),
        }
    return pairs


class AssignsFrozen(keras.layers.Layer):
    """Assigns what its batch yields to a weight that was trainable when it was made."""

    def build(self, shape):
        self.seen = self.add_weight(name="seen", shape=shape[1:])
        self.trainable = False

    def call(self, x):
        self.seen.assign(keras.ops.mean(x, 0))
        return x


@case(
    WORKERS,
    error="The variable .*/seen must be the same .*With sync_every a layer may assign only weights that it adds by add_weight",
)
def frozen_weights_that_a_layer_assigns_are_an_error(world):
    with local(world, 3):
        with world.scope():
            model = keras.Sequential([keras.Input((3,)), AssignsFrozen(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=SIZE, verbose=0)


@case(WORKERS)
def an_exchange_at_each_step_is_the_synchronous_training(world):
    weights = []
    for every in (0, 1):
        with local(world, every):
            model = linear(world, keras.optimizers.SGD, steps_per_execution=3)
            model.fit(X, Y, batch_size=SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    return {"weights": (is_near(*weights), True)}


@case(WORKERS)
def a_gradient_that_is_not_finite_stops_all_workers(world):
    x = X.copy()
    x[0] = np.inf  # of the first worker
    with local(world, 5, nan_policy="stop"):
        model = linear(world, keras.optimizers.SGD)
        try:
            model.fit(x, Y, batch_size=SIZE, shuffle=False, verbose=0)
        except FloatingPointError as e:
            return {
                "error": ("is not finite" in str(e), True),
                "weights": (np.isfinite(model.get_weights()[0]).all(), True),
            }
    raise AssertionError("no error")


@case(WORKERS, warning="Int8.* saves no time among workers of one host")
def other_models(world):
    """BatchNormalization, dropout, accumulation, a loss scale and a compressor."""
    with local(world, 3, tfdist.Outer(learning_rate=0.7, momentum=0.9), compression="int8"):
        with world.scope():
            layers = [
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
            model = keras.Sequential([keras.Input((3,)), *layers])
            adam = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)
            model.compile(keras.optimizers.LossScaleOptimizer(adam), "mse", steps_per_execution=2)
        losses = model.fit(X, Y, batch_size=SIZE, epochs=20, verbose=0).history["loss"]
    first, *others = world.gather(model.get_weights()[:8])
    return {
        "equal": ([all(np.array_equal(a, b) for a, b in zip(first, each, strict=True)) for each in others], [True]),
        "trains": (losses[-1] < 0.7 * losses[0], True),
    }


@case(WORKERS, full=True)
def digits_with_twenty_exchanges(world):
    (x, y), (others, labels) = ((np.reshape(x, (-1, 64)), y) for x, y in digits.load())
    with local(world, 20, tfdist.Outer(learning_rate=0.7, momentum=0.7)):
        with world.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"], steps_per_execution=10)
        model.fit(x, y, batch_size=64, epochs=18, verbose=0)  # 414 steps; without sync_every it reaches 0.97 to 0.99
        accuracy = model.evaluate(others, labels, verbose=0)[1]
    return {"accuracy": (accuracy > 0.95, True)}
