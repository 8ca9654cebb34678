"""Gradients of two replicas, through compressors and optimizers."""

from __future__ import annotations

import dataclasses
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tfdist import ConfigError
from tfdist.collectives.communicator import InProcessCommunicator
from tfdist.collectives.requests import AllReduce, ReduceResult
from tfdist.compression import BF16, FP16, ErrorFeedback, Int8, NoCompression, PerVariable, PowerSGD, TopK, Warmup
from tfdist.compression.base import BucketedReduction, Compressor, StateSpec
from tfdist.gradients import gradient_lists
from tfdist.gradients.optimizer import get_reduction

rng = np.random.default_rng(0)
X, Y = rng.standard_normal((16, 40), np.float32), rng.standard_normal((16, 30)).astype(np.float32)
ROUNDING = 2e-6  # of float32, at most; int8 rounds more


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


@pytest.fixture(scope="module")
def uncompressed(trainer):
    """A model that has been trained without compression, as `fitted` does it."""
    return fitted(trainer)


@pytest.fixture(autouse=True)
def without_compression(trainer):
    yield
    trainer.compression = None


def build(trainer, optimizer=None):
    keras.utils.set_random_seed(1)
    with trainer.scope():
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
        optimizer = optimizer() if callable(optimizer) else optimizer
        model.compile(optimizer or keras.optimizers.SGD(0.1), "mse")
    return model


def weights(model):
    return [w.copy() for w in model.get_weights()]


def descended(trainer, epochs=2, accumulated=1):
    """Returns the weights that plain gradient descent has after epochs of two steps, from those of `build`."""
    kernel, bias = (w.astype(np.float64) for w in build(trainer).get_weights())
    gathered = []
    for rows in [slice(0, 8), slice(8, 16)] * epochs:
        error = 2 * (X[rows] @ kernel + bias - Y[rows]) / Y[rows].size
        gathered.append((X[rows].T @ error, error.sum(0)))
        if len(gathered) == accumulated:
            kernel, bias = (
                w - 0.1 * np.mean(g, 0) for w, g in zip((kernel, bias), zip(*gathered, strict=True), strict=True)
            )
            gathered = []
    return kernel, bias


def fitted(trainer, compression=None, optimizer=None, epochs=2, **how):
    """Returns a model that has been trained for 2 steps an epoch."""
    trainer.compression = compression
    model = build(trainer, optimizer)
    trainer.fit(model, X, Y, batch_size=8, epochs=epochs, verbose=0, **how)
    return model


@dataclasses.dataclass(frozen=True)
class Faulty(Compressor):
    """A compressor of a user's that returns something else than it must."""

    fault: str

    def exchange(self, values, states, member):
        if self.fault == "no generator":
            return ReduceResult(list(values), list(values), list(states))
        return self._exchange(values, states)

    def _exchange(self, values, states):
        totals = yield AllReduce(list(values))
        results = {
            "nothing": None,
            "too few": ReduceResult(totals[:-1], list(values), list(states)),
            "another shape": ReduceResult([total[:1] for total in totals], list(values), list(states)),
            "other contributions": ReduceResult(totals, [value[:1] for value in values], list(states)),
            "no states": ReduceResult(totals, list(values), []),
        }
        return results[self.fault]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no generator", "yield requests, such as"),
        ("nothing", r"return a ReduceResult\(sums, contributions, states\)\. Received: NoneType"),
        ("too few", r"return sums of its values' shapes, \[\(40, 30\)\]\. Received: \[\]"),
        ("another shape", r"return sums of its values' shapes, \[\(40, 30\)\]\. Received: \['\(1, 30\)'\]"),
        ("other contributions", "return contributions of its values' shapes"),
        ("no states", "return a state for each of 1 values. Received: 0"),
    ],
)
def test_a_faulty_compressor_is_named_with_what_it_must_return(fault, message):
    layout, group = BucketedReduction(Faulty(fault), [("kernel", (40, 30))]), InProcessCommunicator(2)
    contexts = group.contexts(tf.constant(0, tf.int64))
    with pytest.raises(ConfigError, match=rf"Faulty\.exchange must {message}"):
        layout.run(group, [[tf.ones((40, 30))]] * 2, [[()]] * 2, contexts, bucket_bytes=0)


def test_no_compression_is_the_same_to_the_bit(trainer, uncompressed):
    for mine, other in zip(weights(fitted(trainer, NoCompression())), weights(uncompressed), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_each_replica_has_an_error_of_its_own_and_all_the_same_q(trainer):
    model = fitted(trainer, ErrorFeedback(PowerSGD(1)))
    (residual, q), bias = get_reduction(model.optimizer).states
    assert bias == []
    first, second = (component.numpy() for component in trainer.strategy.experimental_local_results(residual))
    assert (first != second).any()
    first, second = (component.numpy() for component in trainer.strategy.experimental_local_results(q))
    np.testing.assert_array_equal(first, second)


def test_a_bare_fit_compresses_with_a_wrapped_optimizer(trainer):
    with trainer.scope():
        optimizer = tfdist.distribute_optimizer(keras.optimizers.SGD(0.1), "int8")
    model = build(trainer, optimizer)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    difference = np.abs(weights(model)[0] - descended(trainer)[0]).max()
    assert ROUNDING < difference < 1e-3


BARE = {
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**7),
    "moving_average": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BARE)
def test_a_bare_fit_trains_what_it_cannot_alone(trainer, name):
    with trainer.scope():
        optimizer = tfdist.distribute_optimizer(BARE[name](), NoCompression())
    model = build(trainer, optimizer)
    model.fit(X, Y, batch_size=8, epochs=4, shuffle=False, verbose=0)
    if name == "moving_average":
        expected, near = weights(fitted(trainer, None, BARE[name], 4, shuffle=False)), {"rtol": 1e-6}
    else:
        expected, near = descended(trainer, 4, 2 if name == "accumulation" else 1), {"rtol": 1e-5, "atol": ROUNDING}
    for mine, other in zip(weights(model), expected, strict=True):
        np.testing.assert_allclose(mine, other, **near)


@pytest.mark.parametrize(
    "compressor", tiers.cases([NoCompression(), BF16(), FP16(), Int8(), ErrorFeedback(TopK())], quick=[BF16()])
)
def test_rows_of_embeddings_stay_rows(trainer, compressor):
    words = rng.integers(0, 50, (16, 5))

    def built():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(50, 7), keras.layers.Flatten(), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *layers])

    trainer.compression = compressor
    with trainer.scope():
        model = built()
        model.compile(keras.optimizers.SGD(0.5), "mse")
    plain = built()
    before = plain.get_weights()[0]
    trainer.fit(model, words, Y[:, :2], batch_size=8, epochs=2, shuffle=False, verbose=0)
    for rows in [slice(0, 8), slice(8, 16)] * 2:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(words[rows]) - Y[rows, :2]) ** 2)
        grads = tape.gradient(loss, [variable.value for variable in plain.trainable_variables])
        for variable, grad in zip(plain.trainable_variables, grads, strict=True):
            variable.assign_sub(0.5 * tf.convert_to_tensor(grad))
    table = model.get_weights()[0]
    np.testing.assert_allclose(table, plain.get_weights()[0], atol=1e-3)
    untouched = np.setdiff1d(np.arange(50), words)
    np.testing.assert_array_equal(table[untouched], before[untouched])


def test_topk_warns_of_adam_and_names_others(trainer):
    with (
        pytest.warns(UserWarning, match=r"AdamW normalizes by past gradients.* Use compression 'powersgd' or 'int8'"),
        trainer.scope(),
    ):
        tfdist.distribute_optimizer(keras.optimizers.AdamW(), ErrorFeedback(TopK()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with trainer.scope():
            tfdist.distribute_optimizer(keras.optimizers.SGD(), ErrorFeedback(TopK()))
            tfdist.distribute_optimizer(keras.optimizers.Adam(), ErrorFeedback(Int8()))


def test_a_run_that_ends_before_compression_begins_says_so(trainer, capsys):
    model = fitted(trainer, Warmup(Int8(), 4))
    assert "nothing was compressed: Warmup(Int8(), steps=4) starts after 4 updates, but this training has made 4" in (
        capsys.readouterr().out
    )
    trainer.fit(model, X[:8], Y[:8], batch_size=8, verbose=0)  # the fifth update
    assert "nothing was compressed" not in capsys.readouterr().out


def test_the_report_says_where_nothing_is_gained(trainer, uncompressed, capsys):
    model = fitted(trainer, ErrorFeedback(TopK(1.0, "exact")))
    times = trainer.compression_report(model)["exchange_ms"]
    assert times["compressed"] > 0 and times["plain"] > 0
    said = "compression did not make steps faster here" in capsys.readouterr().out
    assert said == (times["compressed"] >= times["plain"])
    assert trainer.compression_report(uncompressed) == {"exchange_ms": None}


class Counting(NoCompression):
    """Counts exchanges."""

    def state_specs(self, shape):
        return (StateSpec("count", (), True),)

    def for_variable(self, name, shape):
        return self

    def exchange(self, values, states, member):
        reduced = yield from super().exchange(values, states, member)
        return reduced._replace(states=[(count + 1,) for (count,) in states])


@pytest.mark.parametrize("scaled", tiers.cases([False, True], quick=[True]))
def test_accumulation_encodes_once_for_several_steps(trainer, scaled):
    def plain():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)

    optimizer = (lambda: keras.optimizers.LossScaleOptimizer(plain())) if scaled else plain
    model = fitted(trainer, Counting(), optimizer, 4, shuffle=False)
    assert model.optimizer.iterations.numpy() == 2
    assert [count.numpy() for (count,) in get_reduction(model.optimizer).states] == [2, 2]
    for mine, other in zip(weights(model), descended(trainer, 4, accumulated=4), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=ROUNDING)


class Stepper:
    """Gives each replica gradients of its own."""

    def __init__(self, trainer, optimizer, compression, shape=(40, 30), clip_after_reduce=False):
        self.strategy = trainer.strategy
        keras.utils.set_random_seed(1)
        with trainer.scope():
            self.weight = keras.Variable(np.zeros(shape, np.float32), name="weight")
            self.optimizer = tfdist.distribute_optimizer(optimizer(), compression, clip_after_reduce)
            self.optimizer.build([self.weight])
        self.step = tf.function(self._step, autograph=False)

    def _step(self, grads):
        self.strategy.run(lambda grad: self.optimizer.apply([grad], [self.weight]), args=(grads,))

    def __call__(self, *grads, rows=None):
        """Returns the weights, and all state."""

        def mine(context):
            grad = tf.constant(grads[context.replica_id_in_sync_group], tf.float32)
            return grad if rows is None else tf.IndexedSlices(grad, tf.constant(rows), tf.constant(self.weight.shape))

        self.step(self.strategy.experimental_distribute_values_from_function(mine))
        reduction = get_reduction(self.optimizer)
        held = [s for states in reduction.states for s in states] if reduction else []
        held += [v.value for v in getattr(self.optimizer, "_accumulated_gradients", [])]
        local = self.strategy.experimental_local_results
        return self.weight.numpy(), [component.numpy() for state in held for component in local(state)]


ONES = np.linspace(0.5, 1, 1200).reshape(40, 30)
BAD = np.full((40, 30), 0.5)
BAD[3, 4] = np.inf
NAN = np.where(np.isinf(BAD), np.nan, ONES)
LARGE = np.full((40, 30), 3e38)


def sgd(**how):
    return lambda: keras.optimizers.SGD(0.1, **how)


CLIPS = {
    "clipnorm": lambda grad: grad * 0.01 / np.linalg.norm(grad),
    "global_clipnorm": lambda grad: grad * 0.01 / np.linalg.norm(grad),
    "clipvalue": lambda grad: np.clip(grad, -0.01, 0.01),
}


@pytest.mark.parametrize("clip", tiers.cases(CLIPS, quick=1))
def test_the_sum_of_all_replicas_is_clipped_if_asked(trainer, clip):
    """test_optimizers.py tests that each replica's gradient is, otherwise."""
    step = Stepper(trainer, sgd(**{clip: 0.01}), NoCompression(), clip_after_reduce=True)
    found, _ = step(ONES, -3 * ONES)
    np.testing.assert_allclose(found, -0.1 * CLIPS[clip](-2 * ONES), rtol=1e-5)


def scaled(optimizer):
    return lambda: keras.optimizers.LossScaleOptimizer(optimizer(), initial_scale=4.0)


@pytest.mark.parametrize(
    ("optimizer", "grads"),
    [
        (sgd(), (ONES, BAD)),
        pytest.param(sgd(), (LARGE, LARGE), marks=pytest.mark.full),
        pytest.param(scaled(sgd()), (ONES, BAD), marks=pytest.mark.full),
        (scaled(sgd()), (LARGE, LARGE)),
        pytest.param(scaled(sgd(clipvalue=0.2)), (ONES, BAD), marks=pytest.mark.full),
    ],
    ids=["inf", "sum", "scaled_inf", "scaled_sum", "clipped_inf"],
)
@pytest.mark.parametrize(
    "compression",
    tiers.cases([ErrorFeedback(Int8()), ErrorFeedback(PowerSGD(1))], quick=1),
    ids=["int8", "powersgd"],
)
def test_what_is_not_finite_changes_nothing(trainer, optimizer, grads, compression):
    step = Stepper(trainer, optimizer, compression)
    before = step(ONES, 2 * ONES)
    assert np.abs(before[0]).max() > 0 and np.abs(before[1][0]).max() > 0
    for mine, other in zip(tf.nest.flatten(step(*grads)), tf.nest.flatten(before), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert get_reduction(step.optimizer).left_out.numpy() == 1
    assert np.isfinite(step(ONES, ONES)[0]).all()


@pytest.mark.parametrize("optimizer", tiers.cases([sgd(), scaled(sgd())], quick=1), ids=["sgd", "scaled"])
def test_what_is_no_number_is_seen_though_it_is_not_sent(trainer, optimizer):
    """Top-k leaves it out, so that the sum is finite: it would stay in what is left for the next step."""
    step = Stepper(trainer, optimizer, ErrorFeedback(TopK(0.1, samples=100)))
    before = step(ONES, 2 * ONES)
    for mine, other in zip(tf.nest.flatten(step(ONES, NAN)), tf.nest.flatten(before), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert get_reduction(step.optimizer).left_out.numpy() == 1


@pytest.mark.parametrize("optimizer", [sgd(gradient_accumulation_steps=2), scaled(sgd(gradient_accumulation_steps=2))])
def test_what_is_not_finite_is_not_added_up(trainer, optimizer):
    """Each replica adds up its own gradients; whether one of them overflows they decide together."""
    step = Stepper(trainer, optimizer, ErrorFeedback(Int8()))
    expected = Stepper(trainer, optimizer, ErrorFeedback(Int8()))
    step(ONES, 2 * ONES)
    expected(ONES, 2 * ONES)
    if "LossScale" in type(step.optimizer).__name__:
        step(ONES, BAD)  # is left out, and the sum goes on
        assert step.optimizer.dynamic_scale.numpy() == 2
        expected.optimizer.dynamic_scale.assign(2.0)
    else:
        weights, (*errors, _, _) = step(ONES, BAD)  # makes the update of both steps one that is left out
        assert not weights.any() and not np.any(errors)
        step(ONES, 2 * ONES)
    step(ONES, ONES)
    expected(ONES, ONES)
    np.testing.assert_allclose(step.weight.numpy(), expected.weight.numpy(), rtol=1e-6)
    assert step.weight.numpy().any()


def test_rows_that_are_not_finite_change_nothing(trainer):
    step = Stepper(trainer, sgd(), FP16())
    before = step(ONES[:2], ONES[:2], rows=[3, 4])[0].copy()
    np.testing.assert_array_equal(step(ONES[:2], 1e6 * ONES[:2], rows=[3, 4])[0], before)
    assert before[3:5].any() and get_reduction(step.optimizer).left_out.numpy() == 1


def test_updates_that_are_left_out_are_told(trainer, capsys):
    trainer.compression = FP16()
    model = build(trainer)
    trainer.fit(model, X, 1e9 * Y, batch_size=8, verbose=0)
    assert "tfdist: 2 updates were skipped, because a gradient was not finite, or too large for FP16()" in (
        capsys.readouterr().out
    )
    assert model.optimizer.iterations.numpy() == 0


def test_another_compressor_comes_too_late(trainer):
    model = fitted(trainer, Int8())
    trainer.compression = Int8()
    trainer.fit(model, X, Y, batch_size=8, verbose=0)
    trainer.compression = BF16()
    with pytest.raises(ConfigError, match=r"BF16\(\) comes too late: this SGD already has Int8\(\)"):
        trainer.fit(model, X, Y, batch_size=8, verbose=0)


def test_a_loss_scale_around_it_keeps_the_compressor(trainer):
    with trainer.scope():
        inner = tfdist.distribute_optimizer(keras.optimizers.SGD(0.1), "int8")
        outer = tfdist.distribute_optimizer(keras.optimizers.LossScaleOptimizer(inner))
        outer.build([keras.Variable(np.zeros((40, 30)))])
    assert get_reduction(outer).compressor == Int8()


def test_an_optimizer_that_compresses_is_built_first(trainer):
    with trainer.scope():
        optimizer = tfdist.distribute_optimizer(keras.optimizers.SGD(0.1), "int8")
        weight = keras.Variable(np.zeros((40, 30)))
    with pytest.raises(ConfigError, match="must be built first"):
        tf.function(lambda: trainer.strategy.run(lambda: optimizer.apply([tf.ones((40, 30))], [weight])))()


def test_without_gradients_there_is_nothing_to_send(trainer):
    trainer.compression = Int8()
    with trainer.scope():
        model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(30, trainable=False)])
        model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="trainable weights"):
        trainer.fit(model, X, Y, batch_size=8, verbose=0)
    trainer.evaluate(model, X, Y, verbose=0)
    assert get_reduction(model.optimizer) is None


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(30)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


@pytest.mark.parametrize("how", tiers.cases(["own_step", "jit_compile"], quick=1))
def test_it_compresses_with(trainer, how):
    trainer.compression = ErrorFeedback(Int8())
    with trainer.scope():
        model = OwnStep() if how == "own_step" else keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
        model.build((None, 40))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=how == "jit_compile")
    model.set_weights(build(trainer).get_weights())
    trainer.fit(model, X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert ROUNDING < np.abs(weights(model)[0] - descended(trainer)[0]).max() < 1e-3


def test_rules_reach_variables_by_their_paths(trainer):
    model = build(trainer)
    with trainer.scope():
        rules = PerVariable({"kernel": ErrorFeedback(Int8())})
        optimizer = tfdist.distribute_optimizer(keras.optimizers.SGD(), rules)
        optimizer.build(model.trainable_variables)
    kernel, bias = get_reduction(optimizer).states
    assert len(kernel) == 1 and bias == []


@pytest.mark.parametrize("how", ["trainer", "optimizer"])
def test_other_strategies_refuse(how):
    strategy = tfdist.create_strategy("central_storage", devices=2)
    with pytest.raises(ConfigError, match="compression is not possible with CentralStorageStrategy"), strategy.scope():
        if how == "trainer":
            tfdist.Trainer(strategy, compression="int8")
        else:
            tfdist.distribute_optimizer(keras.optimizers.SGD(), "int8")


def test_wrong_names_are_refused_before_tensorflow_starts():
    with pytest.raises(ConfigError, match=r"(?i)unknown compression 'powersdg'; did you mean 'powersgd'"):
        tfdist.Trainer("mirrored", compression="powersdg")


def test_one_device_has_nobody_to_send_to():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = tfdist.distribute_optimizer(keras.optimizers.SGD(0.1), "int8")
    optimizer.build(model.trainable_variables)
    optimizer.apply([tf.ones((3, 2)), tf.ones(2)], model.trainable_variables)
    assert get_reduction(optimizer) is None


def test_gradients_have_their_variables_shapes():
    variable = tf.Variable(tf.ones((2, 3)))

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def shaped(grad):
        rows = tf.IndexedSlices(grad, tf.range(2), tf.constant([2, 3]))
        dense, none, same = gradient_lists.with_static_shapes([grad, None, rows], [variable] * 3)
        assert dense.shape == (2, 3) and none is None and same is rows
        return dense

    np.testing.assert_array_equal(shaped(tf.ones((2, 3))), np.ones((2, 3)))
