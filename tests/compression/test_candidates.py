"""The choice between compressors as functions of measured seconds, and the measures and budgets of the guard."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives.communicator import InProcessCommunicator
from tfdist.collectives.requests import ReduceResult
from tfdist.compression import Int8, PowerSGD, create
from tfdist.compression.base import BucketedReduction
from tfdist.compression.candidates import AUTOMATIC, Candidates, least_lossy, worth_trying
from tfdist.compression.error_feedback import ErrorFeedback
from tfdist.compression.fidelity import NOT_MEASURED, Check, Measures
from tfdist.config import CompressionConfig


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({0: 1.0}, 0),
        ({0: 1.0, 1: 0.96, 2: 0.97}, 0),  # 4 % are not worth a loss
        ({0: 1.0, 1: 0.6, 2: 0.59}, 1),
        ({0: 1.0, 1: 0.6, 2: 0.5, 3: 0.1, 4: 0.098}, 3),
        ({0: 0.1, 2: 0.5}, 0),
    ],
)
def test_the_least_lossy_within_5_percent_of_the_fastest_is_chosen(seconds, chosen):
    assert least_lossy(seconds) == chosen


@pytest.mark.parametrize(
    ("exchange", "step", "tried"),
    [
        ([0.010, 0.006, 0.001], 1.0, [0]),  # exchanges are 1 % of a step
        ([0.5, 0.6, 0.7], 1.0, [0]),
        ([0.5, 0.3, 0.35, 0.1, 0.2], 1.0, [0, 1, 3]),  # what is slower and loses more cannot win
    ],
)
def test_only_what_can_win_is_tried(exchange, step, tried):
    assert worth_trying(exchange, step) == tried


@pytest.mark.parametrize(
    ("compressor", "bucket_bytes", "buckets"),
    [(Int8(), 4 * 64 * 64, [[1], [0]]), (ErrorFeedback(PowerSGD(2)), 0, [[1, 0]])],
)
def test_the_guard_measures_what_numpy_does_of_one_bucket_in_turn(compressor, bucket_bytes, buckets):
    shapes = [(64, 64), (64, 64), (64,)]
    layout = BucketedReduction(compressor, [("", shape) for shape in shapes])
    group = InProcessCommunicator(2)
    rng = np.random.default_rng(0)
    values = [[tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes] for _ in range(2)]
    states = [[tuple(s.initial(s.shape, n) for s in slots) for n, slots in enumerate(layout.slots)]] * 2

    @tf.function(autograph=False)
    def step(number):
        check = Check(number)
        results = layout.run(group, values, states, group.contexts(number), bucket_bytes=bucket_bytes, check=check)
        return results[0].sums, check.after(tf.constant(NOT_MEASURED, tf.float64), tf.zeros([1], tf.float64))

    assert not step(tf.constant(99, tf.int64))[1].numpy().any()
    for number in (100, 200, 300):
        sums, measured = step(tf.constant(number, tf.int64))
        turn = number // 100 % len(buckets)
        exact, compressed = (
            np.concatenate([np.float64(total[index]).ravel() for index in buckets[turn]])
            for total in ([np.add(*pair) for pair in zip(*values, strict=True)], sums)
        )
        error = np.linalg.norm(compressed - exact) / np.linalg.norm(exact)
        cosine = exact @ compressed / np.linalg.norm(exact) / np.linalg.norm(compressed)
        np.testing.assert_allclose(measured.numpy(), [number, turn, error, cosine, 0, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("measures", "has_feedback", "broken"),
    [
        (NOT_MEASURED._replace(relative_error=0.019), False, ""),
        (NOT_MEASURED._replace(relative_error=0.1), False, "relative error 0.1 > 0.02"),
        (NOT_MEASURED._replace(relative_error=0.1, growths=4), True, ""),
        (NOT_MEASURED._replace(residual_ratio=3.0, growths=5), True, "residual 3 of the gradient, grown for 5 checks"),
    ],
)
def test_each_budget_has_its_limit(measures, has_feedback, broken):
    assert measures.broken_budget(has_feedback) == broken


def test_the_residual_grows_for_as_many_checks_as_its_ratio_rises():
    before = tf.constant(NOT_MEASURED, tf.float64)
    growths = []
    for number, ratio in enumerate((1.0, 1.5, 1.2, 1.3), 1):
        check = Check(tf.constant(100 * number, tf.int64))
        check.take([(ReduceResult([], [], []), tf.zeros([3], tf.float64))])
        before = check.after(before, tf.constant([ratio], tf.float64))
        growths.append(Measures(*before.numpy()).growths)
    assert growths == [1, 2, 0, 1]


def test_a_configuration_names_candidates_and_guards():
    assert create("auto") == Candidates(AUTOMATIC, guard=True)
    assert create(CompressionConfig("auto", guard=False)) == Candidates(AUTOMATIC)
    assert create(CompressionConfig("int8", guard=True)) == Candidates((Int8(),), guard=True)
