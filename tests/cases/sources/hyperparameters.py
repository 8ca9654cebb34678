"""Arguments of a built optimizer that the user changes count from the next compile on, also where its slots are split."""

import contextlib

import keras
import numpy as np

from tests.cases.arms import MIRRORED, WORKERS
from tests.cases.case import case
from tests.helpers.options import options_set
from tfdist.gradients.sharded_update import ELEMENTWISE

RATE, STEPS = 0.1, 2
WIDTH = 70  # so that each worker has a piece
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((8, WIDTH)).astype(np.float32)
Y = RANDOM.standard_normal((8, 1)).astype(np.float32)
SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
# The optimizer, and its arguments first and later.
CHANGES = {
    "momentum": (SGD, {"momentum": 0.9}, {"momentum": 0.2}),
    "momentum of zero": (SGD, {"momentum": 0.9}, {"momentum": 0.0}),
    "nesterov": (SGD, {"momentum": 0.9}, {"nesterov": True}),
    "decay": (SGD, {"weight_decay": 0.5}, {"weight_decay": 0.1}),
    "decay begins": (SGD, {}, {"weight_decay": 0.5}),
    "decay ends": (SGD, {"weight_decay": 0.5}, {"weight_decay": None}),
    "clip by value": (SGD, {}, {"clipvalue": 0.01}),
    "clip by norm": (SGD, {"momentum": 0.9}, {"clipnorm": 0.3}),
    "clip by global norm": (SGD, {"clipnorm": 0.3}, {"clipnorm": None, "global_clipnorm": 0.2}),
    "clip ends": (SGD, {"global_clipnorm": 0.3}, {"global_clipnorm": None}),
    "averages": (SGD, {"use_ema": True, "ema_momentum": 0.9}, {"ema_momentum": 0.5}),
    "averages end": (SGD, {"use_ema": True, "ema_momentum": 0.9}, {"use_ema": False}),
    "betas": (ADAM, {}, {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-2}),
    "decay of adam": (ADAM, {"weight_decay": 0.1}, {"weight_decay": 0.4}),
}
DEFAULTS = {
    **dict.fromkeys(("momentum", "weight_decay", "clipvalue", "clipnorm", "global_clipnorm", "use_ema", "nesterov"), 0),
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-7,
    "ema_momentum": 0.99,
}


def split(world):
    return options_set(world.trainer.strategy, shard_optimizer=True)


def linear(world, width=WIDTH):
    with world.scope():
        kernel = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        return keras.Sequential([keras.Input((width,)), kernel])


def fit(world, model, optimizer, **options):
    with world.scope():
        model.compile(optimizer, "mse", **options)
    model.fit(X, Y, batch_size=8, epochs=STEPS, shuffle=False, verbose=0)


def set_all(optimizer, arguments):
    for name, value in arguments.items():
        setattr(optimizer, name, value)


def descend(kind, *phases, rate=RATE):
    """Returns the weights after `STEPS` steps with the arguments of each phase, in NumPy."""
    now = dict(DEFAULTS)
    weights = np.zeros((WIDTH, 1))
    first, second, average = (np.zeros_like(weights) for _ in range(3))
    step = 0
    for phase in phases:
        now |= phase
        for _ in range(STEPS):
            grad = 2 / len(X) * X.T @ (X @ weights - Y)
            norm = np.linalg.norm(grad)
            for limit in (now["clipnorm"], now["global_clipnorm"]):
                grad = grad * (min(1, limit / norm) if limit else 1)
            if now["clipvalue"]:
                grad = np.clip(grad, -now["clipvalue"], now["clipvalue"])
            weights = weights * (1 - rate * (now["weight_decay"] or 0))
            step += 1
            if kind is ADAM:
                first = now["beta_1"] * first + (1 - now["beta_1"]) * grad
                second = now["beta_2"] * second + (1 - now["beta_2"]) * grad**2
                corrected = rate * np.sqrt(1 - now["beta_2"] ** step) / (1 - now["beta_1"] ** step)
                weights = weights - corrected * first / (np.sqrt(second) + now["epsilon"])
            else:
                first = now["momentum"] * first - rate * grad
                weights = weights + (now["momentum"] * first - rate * grad if now["nesterov"] else first)
            kept = now["ema_momentum"] if step > 1 else 0
            average = kept * average + (1 - kept) * weights
        if now["use_ema"]:
            weights = average
    return weights


@case(MIRRORED, WORKERS)
def momentum_that_ends(world):
    """The smallest input of the report."""
    model = linear(world, 1)
    found = []
    with split(world), world.scope():
        optimizer = SGD(0.1, momentum=0.9)
        for momentum in (0.9, 0.0):
            optimizer.momentum = momentum
            model.compile(optimizer, "mse")
            model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=2, verbose=0)
            found.append(model.get_weights()[0].item())
    return {"weights": (found, [0.2, 0.36])}


@case(MIRRORED, WORKERS)
def arguments_set_between_two_fits(world):
    seen = {}
    for name, (kind, first, later) in CHANGES.items():
        model = linear(world)
        with split(world):
            with world.scope():
                optimizer = kind(RATE, **first)
            fit(world, model, optimizer)
            set_all(optimizer, later)
            fit(world, model, optimizer)
        seen[name] = model.get_weights()[0], descend(kind, first, later)
    return seen


@case(MIRRORED, WORKERS)
def arguments_set_before_the_slots_are_split(world):
    """As of a model that is loaded: the slots exist, and are those of the first arguments."""
    seen = {}
    for name in ("momentum of zero", "averages end", "betas"):
        kind, first, later = CHANGES[name]
        model = linear(world)
        with world.scope():
            optimizer = kind(RATE, **first)
        fit(world, model, optimizer)
        model.save(world.folder / f"{world.rank}.keras")
        with split(world):
            with world.scope():
                loaded = keras.models.load_model(world.folder / f"{world.rank}.keras")
            set_all(loaded.optimizer, later)
            fit(world, loaded, loaded.optimizer)
        seen[name] = loaded.get_weights()[0], descend(kind, first, later)
    return seen


class Sets(keras.callbacks.Callback):
    def __init__(self, arguments):
        super().__init__()
        self.arguments = arguments

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == STEPS:
            set_all(self.model.optimizer, self.arguments)


@case(MIRRORED, WORKERS)
def arguments_set_by_a_callback(world):
    """A step that is not a graph reads them each time, as Keras does."""
    kind, first, later = CHANGES["momentum of zero"]
    model = linear(world)
    with split(world), world.scope():
        model.compile(kind(RATE, **first), "mse", run_eagerly=True)
        model.fit(X, Y, batch_size=8, epochs=2 * STEPS, shuffle=False, verbose=0, callbacks=[Sets(later)])
    return {"weights": (model.get_weights()[0], descend(kind, first, later))}


@case(MIRRORED)
def every_number_of_every_optimizer(world):
    """Split slots give the bits of whole ones, whose arguments Keras reads itself."""
    seen = {}
    for kind in ELEMENTWISE:
        found = []
        for way in ("whole", "split"):
            model = linear(world)
            with split(world) if way == "split" else contextlib.nullcontext():
                with world.scope():
                    optimizer = kind(RATE)
                fit(world, model, optimizer)
                config = optimizer.get_config()
                numbers = {name: value / 2 for name, value in config.items() if type(value) is float and value > 0}
                set_all(optimizer, {**numbers, "weight_decay": 0.2})
                fit(world, model, optimizer)
            found.append(model.get_weights()[0])
        seen[kind.__name__] = tuple(found)
    return seen
