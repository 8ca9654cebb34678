"""Gradients of two replicas, through compressors and optimizers."""

from __future__ import annotations

import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import ConfigError
from tfdist.compression import BF16, FP16, ErrorFeedback, Int8, NoCompression, PerVariable, PowerSGD, TopK, Warmup
from tfdist.compression.base import Slot
from tfdist.optimizer import reduction_of

rng = np.random.default_rng(0)
X, Y = rng.standard_normal((16, 40), np.float32), rng.standard_normal((16, 30)).astype(np.float32)


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


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


def fitted(trainer, compression=None, optimizer=None, epochs=2, **how):
    """Returns a model that has been trained for 2 steps an epoch."""
    trainer.compression = compression
    model = build(trainer, optimizer)
    trainer.fit(model, X, Y, batch_size=8, epochs=epochs, verbose=0, **how)
    return model


def test_no_compression_is_the_same_to_the_bit(trainer):
    for mine, other in zip(weights(fitted(trainer, NoCompression())), weights(fitted(trainer)), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_each_replica_has_an_error_of_its_own_and_all_the_same_q(trainer):
    model = fitted(trainer, ErrorFeedback(PowerSGD(1)))
    (residual, q), bias = reduction_of(model.optimizer).states
    assert bias == []
    first, second = (component.numpy() for component in trainer.strategy.experimental_local_results(residual))
    assert (first != second).any()
    first, second = (component.numpy() for component in trainer.strategy.experimental_local_results(q))
    np.testing.assert_array_equal(first, second)


def test_a_bare_fit_compresses_with_a_wrapped_optimizer(trainer):
    with trainer.scope():
        optimizer = tfdist.distribute_optimizer(keras.optimizers.SGD(0.1), "int8")
    model = build(trainer, optimizer)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    expected = weights(fitted(trainer))
    difference = np.abs(weights(model)[0] - expected[0]).max()
    assert 0 < difference < 1e-3


@pytest.mark.parametrize("clip", [{"clipnorm": 0.01}, {"global_clipnorm": 0.01}, {"clipvalue": 0.001}])
def test_clipping_comes_first_unless_asked_otherwise(trainer, clip):
    moved = {}
    for last in (False, True):
        with trainer.scope():
            optimizer = tfdist.distribute_optimizer(
                keras.optimizers.SGD(1.0, **clip), NoCompression(), clip_after_reduce=last
            )
        model = build(trainer, optimizer)
        before = weights(model)
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
        moved[last] = [mine - other for mine, other in zip(weights(model), before, strict=True)]
    sizes = {last: np.sqrt(sum((each**2).sum() for each in moves)) for last, moves in moved.items()}
    if "global_clipnorm" in clip:
        assert sizes[True] == pytest.approx(0.01, rel=1e-3)
        assert 0.01 < sizes[False] < 0.02, "the sum of two that are as long"
    else:
        assert sizes[True] < sizes[False] * 0.99


@pytest.mark.parametrize("compressor", [NoCompression(), BF16(), FP16(), Int8(), ErrorFeedback(TopK())])
def test_rows_of_embeddings_stay_rows(trainer, compressor):
    words = rng.integers(0, 200, (16, 5))

    def trained(compression):
        trainer.compression = compression
        keras.utils.set_random_seed(1)
        with trainer.scope():
            layers = [keras.layers.Embedding(200, 7), keras.layers.Flatten(), keras.layers.Dense(30)]
            model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
            model.compile(keras.optimizers.SGD(0.5), "mse")
        trainer.fit(model, words, Y, batch_size=8, epochs=2, verbose=0)
        return weights(model)

    mine, other = trained(compressor)[0], trained(None)[0]
    np.testing.assert_allclose(mine, other, atol=1e-3)
    untouched = np.setdiff1d(np.arange(200), words)
    np.testing.assert_array_equal(mine[untouched], other[untouched])


def test_topk_warns_of_adam_and_names_others(trainer):
    with pytest.warns(UserWarning, match=r"AdamW divides by .* Use compression 'powersgd' or 'int8'"):
        fitted(trainer, ErrorFeedback(TopK()), keras.optimizers.AdamW, epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(trainer, ErrorFeedback(TopK()), epochs=1)
        fitted(trainer, ErrorFeedback(Int8()), keras.optimizers.Adam, epochs=1)


def test_a_run_that_ends_before_compression_begins_says_so(trainer, capsys):
    fitted(trainer, Warmup(Int8(), 4))
    assert "nothing was compressed: Warmup(Int8, 4) begins after 4 updates, and this training has made 4" in (
        capsys.readouterr().out
    )
    fitted(trainer, Warmup(Int8(), 3))
    assert "nothing was compressed" not in capsys.readouterr().out


def test_the_report_says_where_nothing_is_gained(trainer, capsys):
    model = fitted(trainer, ErrorFeedback(TopK(1.0, "exact")))
    times = trainer.compression_report(model)["exchange_ms"]
    assert times["compressed"] > 0 and times["plain"] > 0
    said = "compression did not make steps faster here" in capsys.readouterr().out
    assert said == (times["compressed"] >= times["plain"])
    assert trainer.compression_report(fitted(trainer)) == {"exchange_ms": None}


class Counting(NoCompression):
    """Counts exchanges."""

    def slots(self, shape):
        return (Slot("count", (), True),)

    def of(self, name, shape):
        return self

    def exchange(self, values, states, member):
        reduced = yield from super().exchange(values, states, member)
        return reduced._replace(states=[(count + 1,) for (count,) in states])


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_encodes_once_for_several_steps(trainer, scaled):
    def plain():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)

    model = fitted(trainer, Counting(), (lambda: keras.optimizers.LossScaleOptimizer(plain())) if scaled else plain, 4)
    assert model.optimizer.iterations.numpy() == 2
    assert [count.numpy() for (count,) in reduction_of(model.optimizer).states] == [2, 2]
    expected = fitted(trainer, None, plain, 4)
    for mine, other in zip(weights(model), weights(expected), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


def test_a_step_that_overflows_on_one_replica_is_not_added_up(trainer):
    """Each replica adds up its own gradients; whether one of them overflows they decide together."""

    def optimizer():
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)

    bad = np.concatenate([X[:8], X[:8], X[8:]])
    bad[12] = 1e30  # of the second step, on one replica
    found = {}
    for name, (x, y) in {"bad": (bad, np.concatenate([Y[:8], Y])), "good": (X, Y)}.items():
        model = build(trainer, optimizer)
        trainer.fit(model, x, y, batch_size=8, shuffle=False, verbose=0)
        found[name] = weights(model)
        assert model.optimizer.iterations.numpy() == 1
        assert model.optimizer.dynamic_scale.numpy() == (2.0**9 if name == "bad" else 2.0**10)
    for mine, other in zip(*found.values(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


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


@pytest.mark.parametrize("how", ["jit_compile", "own_step"])
def test_it_compresses_with(trainer, how):
    moved = {}
    for compressor in (None, ErrorFeedback(Int8())):
        keras.utils.set_random_seed(1)
        trainer.compression = compressor
        with trainer.scope():
            model = OwnStep() if how == "own_step" else keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)])
            model.build((None, 40))
            model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=how == "jit_compile")
        trainer.fit(model, X, Y, batch_size=8, epochs=2, verbose=0)
        moved[compressor is None] = weights(model)
    assert 0 < np.abs(moved[True][0] - moved[False][0]).max() < 1e-3


def test_rules_reach_variables_by_their_paths(trainer):
    model = fitted(trainer, PerVariable({"kernel": ErrorFeedback(Int8())}))
    kernel, bias = reduction_of(model.optimizer).states
    assert len(kernel) == 1 and bias == []


OTHERS = {
    "trainer": "tfdist.Trainer('central_storage', devices=2, compression='int8')",
    "optimizer": """
import keras
strategy = tfdist.create_strategy('central_storage', devices=2)
with strategy.scope():
    tfdist.distribute_optimizer(keras.optimizers.SGD(), 'int8')
""",
}


@pytest.mark.parametrize("how", OTHERS)
def test_other_strategies_refuse(how):
    program = f"import tfdist; {OTHERS[how]}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "compression is not possible under CentralStorageStrategy" in done.stderr


def test_wrong_names_are_refused_before_tensorflow_starts():
    with pytest.raises(ConfigError, match=r"(?i)unknown compression 'powersdg'; did you mean 'powersgd'"):
        tfdist.Trainer("mirrored", compression="powersdg")


def test_one_device_has_nobody_to_send_to():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = tfdist.distribute_optimizer(keras.optimizers.SGD(0.1), "int8")
    optimizer.build(model.trainable_variables)
    optimizer.apply([tf.ones((3, 2)), tf.ones(2)], model.trainable_variables)
    assert reduction_of(optimizer) is None
