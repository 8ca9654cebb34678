"""Two replicas' updates are one device's: whichever optimizers a step applies, wherever the model keeps them."""

from __future__ import annotations

import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tfdist import ConfigError
from tfdist.compat import optimizer_search
from tfdist.compression import ErrorFeedback, Int8, NoCompression
from tfdist.gradients import gradient_lists

rng = np.random.default_rng(0)
X, Y = rng.standard_normal((12, 4)), rng.standard_normal((12, 1))
START = np.linspace(-1, 1, 4)[:, None]
RATE = 0.01


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


def gradient(weights, x, y):
    """Returns the gradient of the mean square error of x @ weights."""
    return 2 * x.T @ (x @ weights - y) / len(x)


def descended(batch=4, factor=1.0, times=1):
    """Returns the weights after one epoch of plain gradient descent, several times along each batch."""
    weights = START
    for begin in range(0, len(X), batch):
        for _ in range(times):
            rows = slice(begin, begin + batch)
            weights = weights - RATE * factor * gradient(weights, X[rows], Y[rows])
    return weights


class Linear(keras.Model):
    """x @ weights, with a training step of its own."""

    def __init__(self, dtype="float32"):
        super().__init__(dtype=dtype)
        self.dense = keras.layers.Dense(1, use_bias=False, dtype=dtype)
        self.dense.build((None, 4))
        self.dense.kernel.assign(START)

    def build(self, shape):
        self.built = True

    def call(self, x):
        return self.dense(x)

    def optimizers(self):
        return [self.optimizer]

    def train_step(self, data):
        x, y = data
        for optimizer in self.optimizers():
            with tf.GradientTape() as tape:
                value = tf.reduce_mean((self(x) - tf.cast(y, self.compute_dtype)) ** 2)
            variables = self.dense.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        return {"value": value}


def sgd(model, built=True, **how):
    optimizer = keras.optimizers.SGD(RATE, **how)
    if built:
        optimizer.build(model.dense.trainable_variables)
    return optimizer


def trained(trainer, make, batch=4, **how):
    with trainer.scope():
        model = make()
        if not model.compiled:
            model.compile(**how)
    trainer.fit(model, X, Y, batch_size=batch, shuffle=False, verbose=0)
    return model


class Part(keras.Sequential):
    """A model within the model, compiled with an optimizer."""


def in_a_submodel(model, built):
    model.part = Part([model.dense])
    model.part.compile(sgd(model, built))
    model.optimizers = lambda: [model.part.optimizer]


def in_a_layer(model, built):
    model.dense.mine = [sgd(model, built)]
    model.optimizers = lambda: model.dense.mine


def in_a_helper(model, built):
    model.tools = types.SimpleNamespace(more={"tools": types.SimpleNamespace(optimizer=sgd(model, built))})
    model.optimizers = lambda: [model.tools.more["tools"].optimizer]


def in_a_dict_of_lists(model, built):
    model.kept = {"main": [sgd(model, built)]}
    model.optimizers = lambda: model.kept["main"]


def in_a_global(model, built):
    optimizer = sgd(model, built)
    model.optimizers = lambda: [optimizer]


KEPT = [in_a_submodel, in_a_layer, in_a_helper, in_a_dict_of_lists]


def test_optimizers_are_found_wherever_they_are_kept(trainer):
    """All are applied in turn in each step."""
    kept = []

    def make():
        model = Linear()
        for number, keep in enumerate(KEPT):
            keep(model, built=number % 2 == 0)
            kept.extend(model.optimizers())
        model.optimizers = lambda: kept
        return model

    model = trained(trainer, make)
    np.testing.assert_allclose(model.dense.kernel.numpy(), descended(times=len(KEPT)), rtol=1e-5)
    found = optimizer_search.optimizers(model)
    for optimizer in kept:
        assert any(each is optimizer for each in found), "so that a backup holds it"
        assert optimizer.iterations.numpy() == 3


@pytest.mark.parametrize(
    ("built", "scaled"), tiers.cases(itertools.product([False, True], repeat=2), quick=[(True, True)])
)
def test_an_optimizer_that_the_model_does_not_hold_is_refused(trainer, built, scaled):
    class Hidden(Linear):
        def train_step(self, data):
            return super().train_step(data)

    def make():
        model = Hidden()
        optimizer = sgd(model, built)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            optimizer.build(model.dense.trainable_variables)
        Hidden.optimizers = lambda self: [optimizer]
        return model

    with pytest.raises(ConfigError, match="applies an optimizer, SGD, that the model does not hold"):
        trained(trainer, make)


def test_an_optimizer_that_reduces_and_is_not_found_is_built_first(trainer):
    def make():
        model = Linear()
        optimizer = tfdist.distribute_optimizer(keras.optimizers.SGD(RATE))
        Linear.hidden = lambda self: [optimizer]
        model.optimizers = model.hidden
        return model

    with pytest.raises(ConfigError, match=r"The optimizer \w*SGD must be built before fit: optimizer\.build"):
        trained(trainer, make)


@pytest.mark.parametrize("distribute", [lambda optimizer: optimizer, tfdist.distribute_optimizer], ids=["plain", "own"])
def test_an_optimizer_built_outside_of_its_scope_is_told_the_remedy(trainer, distribute):
    with trainer.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = distribute(keras.optimizers.Adam())
    with pytest.raises(
        ConfigError, match=r"built outside of the scope .*: call optimizer\.build\(variables\) in `with"
    ):
        optimizer.build(model.trainable_variables)
    with trainer.scope():
        optimizer.build(model.trainable_variables)
    assert optimizer.built


def test_compiled_parts_that_train_nothing_are_no_fault(trainer):
    outside = keras.optimizers.SGD()

    def make():
        model = Linear()
        model.teacher = Part([keras.Input((4,)), keras.layers.Dense(1)])
        model.teacher.compile(keras.optimizers.SGD())
        model.tools = types.SimpleNamespace(model=model, optimizer=outside)
        model.compile(keras.optimizers.SGD(RATE))
        return model

    np.testing.assert_allclose(trained(trainer, make).dense.kernel.numpy(), descended(), rtol=1e-5)


@pytest.mark.parametrize("built", tiers.cases([False, True], quick=1))
def test_a_model_may_keep_the_optimizer_that_a_loss_scale_wraps(trainer, built):
    def make():
        model = Linear()
        model.mine = sgd(model, built)
        model.train_step = types.MethodType(keras.Model.train_step, model)
        model.compile(keras.optimizers.LossScaleOptimizer(model.mine, initial_scale=16.0), "mse")
        return model

    np.testing.assert_allclose(trained(trainer, make).dense.kernel.numpy(), descended(), rtol=1e-5)


def test_applying_what_a_loss_scale_wraps_is_refused(trainer):
    def make():
        model = Linear()
        model.compile(keras.optimizers.LossScaleOptimizer(sgd(model)))
        model.optimizers = lambda: [model.optimizer.inner_optimizer]
        return model

    with pytest.raises(ConfigError, match="applies SGD, which a LossScaleOptimizer wraps"):
        trained(trainer, make)


class TwoOptimizers(Linear):
    """Scales the loss by one optimizer, and applies two."""

    def __init__(self):
        super().__init__()
        self.first, self.second = sgd(self), sgd(self)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.first.scale_loss(tf.reduce_mean((self(x) - y) ** 2))
        variables = self.dense.trainable_variables
        grads = tape.gradient(loss, variables)
        self.first.apply(grads, variables)
        self.second.apply(grads, variables)
        return {"loss": loss}


class TwoLosses(Linear):
    """Applies one optimizer to the gradients of two losses, of which it scales one."""

    def train_step(self, data):
        x, y = data
        variables = self.dense.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            plain = tf.reduce_mean((self(x) - y) ** 2)
            loss = self.optimizer.scale_loss(plain)
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.optimizer.apply(tape.gradient(plain, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [TwoOptimizers, TwoLosses])
@pytest.mark.parametrize("batch", tiers.cases([4, 3], quick=[3]))  # of which replicas have two examples and one
def test_a_share_counts_once_whatever_is_scaled(trainer, kind, batch):
    model = trained(trainer, kind, batch, optimizer="sgd")
    np.testing.assert_allclose(model.dense.kernel.numpy(), descended(batch, factor=2), rtol=1e-5)


CLIPS = {
    "clipnorm": lambda grad, limit: grad * min(1, limit / np.linalg.norm(grad)),
    "global_clipnorm": lambda grad, limit: grad * min(1, limit / np.linalg.norm(grad)),
    "clipvalue": lambda grad, limit: np.clip(grad, -limit, limit),
}


class Loop:
    """Gives each replica a gradient of its own, in a loop without the Trainer."""

    def __init__(self, trainer, optimizer, compression=None, dtype="float32", built=True):
        self.strategy = trainer.strategy
        with trainer.scope():
            self.weight = keras.Variable(np.zeros(3), dtype=dtype, name="weight")
            self.other = keras.Variable(np.zeros(3), dtype=dtype, name="other")
            self.optimizer = tfdist.distribute_optimizer(optimizer(), compression)
            if built:
                self.optimizer.build([self.weight, self.other])

    def __call__(self, *grads, also=None):
        """Applies them, and to the other variable `also` on each replica."""

        def mine(context):
            return tf.constant(grads[context.replica_id_in_sync_group], self.weight.dtype)

        def apply(grad):
            other = None if also is None else tf.constant(also, self.weight.dtype)
            self.optimizer.apply([grad, other], [self.weight, self.other])

        values = self.strategy.experimental_distribute_values_from_function(mine)
        tf.function(lambda values: self.strategy.run(apply, args=(values,)), autograph=False)(values)


NO = NoCompression()
GRADS = np.array([[3.0, -4.0, 0.0], [0.5, 0.0, 0.0]])


QUICK = [("clipnorm", None, None), ("global_clipnorm", 1024.0, NO), ("clipvalue", 1024.0, None)]


@pytest.mark.parametrize(
    ("clip", "factor", "compression"),
    tiers.cases(itertools.product(CLIPS, [None, 1024.0], [None, NO]), quick=QUICK),
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_each_replica_clips_at_the_threshold_whatever_the_loss_is_multiplied_by(trainer, clip, factor, compression):
    loop = Loop(trainer, lambda: keras.optimizers.SGD(1.0, loss_scale_factor=factor, **{clip: 1.0}), compression)
    loop(*(GRADS * (factor or 1)))
    np.testing.assert_allclose(loop.weight.numpy(), -sum(CLIPS[clip](grad, 1.0) for grad in GRADS), rtol=1e-6)


@pytest.mark.parametrize("clip", tiers.cases(CLIPS, quick=1))
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_each_replica_clips_what_it_has_accumulated(trainer, clip):
    loop = Loop(trainer, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2, **{clip: 1.0}))
    loop(*GRADS)
    loop(*(3 * GRADS))
    np.testing.assert_allclose(loop.weight.numpy(), -sum(CLIPS[clip](2 * grad, 1.0) for grad in GRADS), rtol=1e-6)


class Signs(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply([None if grad is None else tf.sign(grad) for grad in grads], trainable_variables)


@pytest.mark.parametrize("compression", tiers.cases([None, NO], quick=1))
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_what_overrides_apply_sees_each_steps_reduced_gradient(trainer, compression):
    loop = Loop(trainer, lambda: Signs(1.0, gradient_accumulation_steps=2, clipvalue=0.75), compression)
    loop([3.0, -1.0, 1.0], [-1.0, -1.0, -3.0])  # sums: 2, -2, -2
    assert not loop.weight.numpy().any()
    loop([3.0, 1.0, 1.0], [-1.0, 1.0, -3.0])  # sums: 2, 2, -2
    np.testing.assert_allclose(loop.weight.numpy(), [-0.75, 0, 0.75])


@pytest.mark.parametrize("compression", tiers.cases([NO, None], quick=1))
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_an_update_begins_to_accumulate_anew_for_all_variables(trainer, compression):
    loop = Loop(trainer, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), compression)
    loop(*GRADS, also=np.ones(3))
    loop(*GRADS)  # the other variable has lost its gradient, and what was added up with it
    assert not loop.other.numpy().any()
    loop(*GRADS, also=np.ones(3))
    loop(*GRADS, also=np.ones(3))
    np.testing.assert_allclose(loop.other.numpy(), -2 * np.ones(3))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_16_bit_gradients_are_compressed_with_their_loss_scale(trainer):
    """Each replica's share without the scale is too small for 16 bits, and their sum is not."""
    scale, small = 2.0**14, 2.0**-25
    loop = Loop(
        trainer,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=scale),
        NoCompression(),
        dtype="float16",
    )
    loop(*np.full((2, 3), scale * small))
    np.testing.assert_array_equal(loop.weight.numpy(), np.full(3, -2 * small, np.float16))


@pytest.mark.parametrize("clip", tiers.cases([{"clipnorm": 0.05}, {}], quick=1))
def test_an_optimizer_may_first_train_alone_and_then_under_a_loss_scale(trainer, clip):
    """What its first distribution has made of it must not stay: gradients would be reduced, scaled or clipped twice."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 3)), rng.standard_normal((16, 1))
    with trainer.scope():
        leaf = keras.optimizers.SGD(0.1, **clip)
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="float64")
        model = keras.Sequential([keras.Input((3,), dtype="float64"), layer])
    weights = np.zeros((3, 1))
    for wrapped in (False, True, False):
        with trainer.scope():
            optimizer = keras.optimizers.LossScaleOptimizer(leaf, initial_scale=8.0) if wrapped else leaf
            model.compile(optimizer, "mse", jit_compile=False)
        trainer.fit(model, x, y, batch_size=8, shuffle=False, verbose=0)
        for xs, ys in ((x[:8], y[:8]), (x[8:], y[8:])):
            gradient = 2 * xs.T @ (xs @ weights - ys) / 8
            norm = np.linalg.norm(gradient)
            weights -= 0.1 * (gradient * min(1, clip["clipnorm"] / norm) if clip else gradient)
        assert model.get_weights()[0] == pytest.approx(weights, abs=1e-6)


def test_a_loss_scale_in_a_loop_of_ones_own_is_built_first(trainer):
    loop = Loop(trainer, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)), built=False)
    with pytest.raises(ConfigError, match=r"with a loss scale must be built first: optimizer\.build"):
        loop(*GRADS)


def test_a_thawed_layer_is_named_where_gradients_are_compressed():
    trainer = tfdist.Trainer(tfdist.create_strategy("mirrored", devices=2), compression=ErrorFeedback(Int8()))
    with trainer.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="cold"), keras.layers.Dense(1)])
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(RATE), "mse")
    trainer.fit(model, X, Y, batch_size=4, verbose=0)
    model.layers[0].trainable = True
    with trainer.scope():
        model.compile(model.optimizer, "mse")
    with pytest.raises(ConfigError, match=r"SGD was built without the variable .*cold/kernel"):
        trainer.fit(model, X, Y, batch_size=4, verbose=0)


def test_a_training_step_that_is_a_function_of_tensorflows_is_refused(trainer):
    class Compiled(Linear):
        train_step = tf.function(Linear.train_step)

    with pytest.raises(
        ConfigError, match=r"train_step of Compiled \(a tf\.function\) is not possible with .* leave @tf.function out"
    ):
        trained(trainer, Compiled, optimizer="sgd")


def test_a_share_of_three_replicas_has_the_precision_that_is_asked_for():
    assert gradient_lists.factor(1 / 3, tf.float64).numpy() == 1 / 3
    (third,) = gradient_lists.scale([tf.constant(1, tf.float64)], 1 / 3)
    (share,) = gradient_lists.scale_no_nan([tf.constant(1, tf.float64)], 1 / 3)
    assert third.numpy() == share.numpy() == 1 / 3


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("batch", tiers.cases([3, 4], quick=[3]))
def test_float64_has_all_of_its_precision(trainer, own, batch):
    def make():
        model = Linear("float64")
        if not own:
            model.train_step = types.MethodType(keras.Model.train_step, model)
        model.compile(keras.optimizers.SGD(RATE), "mse")
        model.optimizer.build(model.dense.trainable_variables)
        model.optimizer.learning_rate = RATE
        return model

    keras.config.set_floatx("float64")
    try:
        kernel = trained(trainer, make, batch).dense.kernel.numpy()
    finally:
        keras.config.set_floatx("float32")
    np.testing.assert_allclose(kernel, descended(batch), rtol=1e-13)


@pytest.mark.parametrize(
    "name", ["mirrored", pytest.param("multi_worker_mirrored", marks=pytest.mark.full), "central_storage"]
)
def test_averages_overwrite_the_weights_of_one_replica(name):
    trainer = tfdist.Trainer(name, devices=["CPU:0"])
    with trainer.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.SGD(RATE, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
        model.compile(optimizer, "mse")
    model.set_weights([START])
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    weights = average = START
    for update, begin in enumerate([*range(0, 12, 4)] * 2, 1):
        rows = slice(begin, begin + 4)
        weights = weights - RATE * gradient(weights, X[rows], Y[rows])
        average = weights if update == 1 else 0.5 * average + 0.5 * weights
        if update % 2 == 0:
            weights = average
    np.testing.assert_allclose(model.get_weights()[0], weights, rtol=1e-5)
