"""What XLA compiles of codecs gives the same bits as ordinary operations, wherever a step runs."""

from __future__ import annotations

import gc
import itertools
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.compression.test_compressors import INPUTS, Run
from tests.helpers import tiers
from tfdist.compression import compiled
from tfdist.compression.error_feedback import ErrorFeedback
from tfdist.compression.int8 import Int8
from tfdist.compression.topk import TopK
from tfdist.compression.warmup import Warmup

SHAPES = [(37, 29), (3, 3, 16, 9), (2000, 1)]  # odd tails
RAGGED = {
    "infinite": lambda rng, shape: np.where(rng.random(shape) < 1e-3, -np.inf, rng.standard_normal(shape)),
    "nan": lambda rng, shape: np.where(rng.random(shape) < 1e-3, np.nan, rng.standard_normal(shape)),
    "huge": lambda rng, shape: rng.standard_normal(shape) * 1e38,
    "at_the_least": lambda rng, shape: rng.standard_normal(shape) * 2.0**-113,
}
ALWAYS, NEVER = 1, 2**62


@pytest.fixture
def counted(monkeypatch):
    """Returns the list of the functions that XLA has got to compile, which it compiles whatever their size."""
    made, function = [], tf.function

    def trace(*args, **kwargs):
        if kwargs.get("jit_compile"):
            made.append(args[0])
        return function(*args, **kwargs)

    monkeypatch.setattr(tf, "function", trace)
    monkeypatch.setattr(compiled, "LEAST", ALWAYS)
    return made


CODECS = {"int8": ErrorFeedback(Int8(block=64)), "topk": ErrorFeedback(TopK(0.05, samples=100))}


@pytest.mark.parametrize(  # int8 adds eight ranks at once
    ("ranks", "codec"),
    tiers.cases(itertools.product([1, 2, 3, 8, 9, 20], CODECS), quick=[(2, "int8"), (2, "topk")]),
)
def test_bits_are_the_same_with_and_without_xla(ranks, codec, monkeypatch, request):
    # See docs/compression.md. The cause is not found; it is not the order of the sum.
    if (ranks, codec) == (20, "int8"):
        request.applymarker(pytest.mark.xfail(reason="last bits differ on AMD EPYC with AVX-512", strict=False))
    found = {}
    for least in (ALWAYS, NEVER):
        monkeypatch.setattr(compiled, "LEAST", least)
        run = Run(CODECS[codec], ranks, SHAPES, bucket_bytes=0)
        for kind, make in (INPUTS | RAGGED).items():
            run.start()
            rng = np.random.default_rng(0)
            with np.errstate(over="ignore"):
                steps = [run.random_step(rng, make)[1] for _ in range(2)]
            found[least, kind] = [np.asarray(each) for each in tf.nest.flatten(steps)]
    for kind in INPUTS | RAGGED:
        for by_xla, without in zip(found[ALWAYS, kind], found[NEVER, kind], strict=True):
            np.testing.assert_array_equal(by_xla, without, kind)


def double(numbers):
    return numbers * 2


def test_a_shape_is_compiled_once_for_all_graphs_and_keeps_none_of_them(counted):
    call = compiled.compiled(double)
    numbers = tf.ones([8, 4])
    graphs = []
    for _ in range(3):
        step = tf.function(lambda: call(numbers) + call(numbers), autograph=False)
        np.testing.assert_array_equal(step(), np.full([8, 4], 4))
        graphs.append(weakref.ref(step.get_concrete_function().graph))
        del step
    assert counted.count(double) == 1
    call(tf.ones([3, 4]))
    assert counted.count(double) == 2
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 3


def test_few_numbers_and_graphs_that_only_plan_are_not_compiled(counted, monkeypatch):
    call = compiled.compiled(double)
    with tf.Graph().as_default():
        call(tf.ones([8, 4]))
    Int8().bytes_per_step([(300, 400)], 2)
    monkeypatch.setattr(compiled, "LEAST", 33)
    call(tf.ones([8, 4]))
    assert not counted


def test_it_runs_eagerly_in_conditions_in_loops_and_on_replicas(counted):
    call, numbers = compiled.compiled(double), tf.ones([8, 4])

    @tf.function(autograph=False)
    def looped(flag):
        def once(done, total):
            return done + 1, tf.cond(flag, lambda: call(total), lambda: total)

        return tf.while_loop(lambda done, _: done < 3, once, [0, numbers])[1]

    np.testing.assert_array_equal(call(numbers), numbers * 2)
    np.testing.assert_array_equal(looped(tf.constant(True)), numbers * 8)
    np.testing.assert_array_equal(looped(tf.constant(False)), numbers)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for run in (strategy.run, tf.function(strategy.run, autograph=False)):
        results = strategy.experimental_local_results(run(call, (numbers,)))
        assert len(results) == 2
        for result in results:
            np.testing.assert_array_equal(result, numbers * 2)
    assert counted.count(double) == 1


def test_without_xla_operations_are_ordinary(counted, monkeypatch):
    monkeypatch.setattr(compiled, "has_xla", lambda: False)
    np.testing.assert_array_equal(compiled.compiled(double)(tf.ones([8, 4])), np.full([8, 4], 2))
    assert not counted


@pytest.mark.full
@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_a_fit_trains_the_same_bits_with_and_without_xla(mirrored, codec, monkeypatch, counted):
    """With steps in a loop of the graph, and a codec that begins after some of them."""
    trainer, found = tfdist.Trainer(mirrored), {}
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((96, 20)).astype(np.float32), rng.integers(0, 3, 96)
    for least in (ALWAYS, NEVER):
        monkeypatch.setattr(compiled, "LEAST", least)
        counted.clear()
        trainer.compression = Warmup(CODECS[codec], 3)
        keras.utils.set_random_seed(1)
        with trainer.scope():
            model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(150, "relu"), keras.layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, steps_per_execution=2)
        trainer.fit(model, x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        found[least] = model.get_weights()
        assert bool(counted) == (least == ALWAYS)
    trainer.compression = None
    for by_xla, without in zip(found[ALWAYS], found[NEVER], strict=True):
        np.testing.assert_array_equal(by_xla, without)
