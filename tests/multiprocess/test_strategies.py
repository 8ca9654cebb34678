"""Every strategy trains, evaluates and predicts as one process does; two replicas as tf_keras' two do."""

import numpy as np
import pytest

from tests.multiprocess.conftest import SYNCHRONOUS
from tests.multiprocess.models import CASES

# Every run of the two programs takes up to a minute on two cores.
pytestmark = pytest.mark.timeout(600)

WITHOUT_BATCH_NORM = [case for case in CASES if not case.startswith("cnn")]


def difference(a, b):
    """The largest difference between two structures of numbers."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max(difference(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        return max(difference(x, y) for x, y in zip(a, b, strict=True))
    assert np.shape(a) == np.shape(b)
    return float(np.abs(np.asarray(a, np.float64) - b).max(initial=0))


def bitwise_equal(a, b):
    return difference(a, b) == 0


@pytest.mark.parametrize("case", WITHOUT_BATCH_NORM)
def test_weights_and_losses_equal_one_process(single, ranks, case):
    for results in ranks:
        assert difference(results["parity"][case], single["parity"][case]) < 1e-5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_weights_and_losses_equal_tf_keras_on_two_workers(runs, strategy, case):
    legacy = runs("multi_worker_mirrored", "legacy_program")[0][0]
    for results in runs(strategy)[0]:
        assert difference(results["parity"][case], legacy[case]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_mirrored_equals_multi_worker_bitwise(runs, case):
    (mirrored,), multi_worker = runs("mirrored")[0], runs("multi_worker_mirrored")[0]
    for results in multi_worker:
        assert bitwise_equal(results["parity"][case], mirrored["parity"][case])


def test_trainer_fit_equals_bare_fit(ranks):
    for results in ranks:
        assert difference(results["trainer_fit"], results["parity"]["cnn_sgd"]) < 1e-6


def test_training_moved_the_weights_and_the_statistics(single):
    for case in CASES:
        losses = single["parity"][case]["history"]["loss"]
        assert losses[-1] < losses[0] - 0.01
    _, mean, variance = single["parity"]["cnn_sgd"]["weights"][2:5]
    assert np.abs(variance - 1).max() > 0.01 and np.abs(mean).max() > 0.01


@pytest.mark.parametrize("size", [1, 5, 32, 33, 63, 77, "files"])
def test_evaluate_and_predict_equal_one_process(single, ranks, size):
    expected = single["inference"][size]
    length = 28 if size == "files" else size
    for results in ranks:
        for kind, (evaluation, predictions) in results["inference"][size].items():
            assert predictions.shape == (length, 3)
            assert difference(predictions, expected[kind][1]) < 1e-5, kind
            assert difference(evaluation, expected[kind][0]) < 1e-5, kind


def test_an_unseeded_shuffled_epoch_has_each_example_once(ranks):
    numbers = np.arange(96, dtype=np.float64)
    for results in ranks:
        for exponent in range(4):
            sums = results["coverage"][f"power{exponent}"]
            assert np.allclose(sums, (numbers**exponent).sum(), rtol=1e-6), exponent


def masks(runs, strategy):
    return np.concatenate([results["dropout"] for results in runs(strategy)[0]], axis=2)


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_dropout_masks_differ_between_replicas_and_steps_and_not_between_runs(runs, strategy):
    found = masks(runs, strategy)
    assert found.shape == (2, 2, 2, 8, 40)
    assert (found[0] == found[1]).all(), "two runs of one seed"
    views = [found[0][step, replica] for step in range(2) for replica in range(2)]
    for i, a in enumerate(views):
        assert 0.35 < a.mean() < 0.65
        for b in views[:i]:
            # Independent masks agree in half of their elements.
            assert 0.35 < (a == b).mean() < 0.65


def test_dropout_masks_are_those_of_another_program_with_the_seed(runs):
    assert (masks(runs, "mirrored") == masks(runs, "multi_worker_mirrored")).all()


@pytest.mark.parametrize("way", ["trainer", "bare", "eager"])
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker_mirrored"])
def test_replicas_and_steps_draw_numbers_of_their_own(runs, strategy, way):
    first, again = (
        np.concatenate([results["noise"]["draws"][way, attempt] for results in runs(strategy)[0]], axis=1)
        for attempt in range(2)
    )
    assert first.shape == (3, 2, 5, 16)
    assert (first == again).all(), "two runs of one seed"
    for kind in range(5):
        views = first[:, :, kind].reshape(6, 16)
        assert len(np.unique(views, axis=0)) == 6, kind


@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker_mirrored"])
def test_a_state_tree_gives_each_replica_its_seed_back(runs, strategy):
    noise = [results["noise"] for results in runs(strategy)[0]]
    assert [each["after"] for each in noise] == [each["before"] for each in noise]
    assert len({state[0] for each in noise for state in each["after"]}) == 2
