"""Every strategy trains, evaluates and predicts as one process does, two replicas as tf_keras' two do; ranks are equal, files one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import tiers
from tests.multiprocess import models
from tests.multiprocess.conftest import SYNCHRONOUS
from tests.multiprocess.models import CASES, QUICK_CASES

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


# Mirrored replicas do all this in the tests of one process, too: tests/strategies, tests/step, tests/fuzz.
FURTHER_MIRRORED = (
    pytest.param("central_storage", marks=pytest.mark.slow),
    pytest.param("mirrored", marks=pytest.mark.full),
    "multi_worker_mirrored",
)


def bitwise_equal(a, b):
    return difference(a, b) == 0


def parity(found, strategy, case):
    """Returns what each rank has trained in a case."""
    scenario = "parity" if case in QUICK_CASES else "further_parity"
    return [results[case] for results in found(strategy, scenario)]


@pytest.mark.parametrize("case", tiers.cases(WITHOUT_BATCH_NORM, quick=QUICK_CASES))
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_weights_and_losses_equal_one_process(found, strategy, case):
    for results in parity(found, strategy, case):
        assert difference(results, parity(found, "one_device", case)[0]) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_weights_and_losses_equal_tf_keras_on_two_workers(runs, found, strategy, case):
    legacy = runs("multi_worker_mirrored", "legacy_program")[0][0]
    for results in parity(found, strategy, case):
        assert difference(results, legacy[case]) < 1e-5


@pytest.mark.parametrize("case", tiers.cases(CASES, quick=QUICK_CASES))
def test_mirrored_equals_multi_worker_bitwise(found, case):
    (mirrored,) = parity(found, "mirrored", case)
    for results in parity(found, "multi_worker_mirrored", case):
        assert bitwise_equal(results, mirrored)


@pytest.mark.parametrize("strategy", FURTHER_MIRRORED)
def test_trainer_fit_equals_bare_fit(found, strategy):
    for results, bare in zip(found(strategy, "trainer_fit"), parity(found, strategy, "cnn_sgd"), strict=True):
        assert difference(results, bare) < 1e-6


@pytest.mark.parametrize("case", tiers.cases(CASES, quick=QUICK_CASES))
def test_training_moved_the_weights_and_the_statistics(found, case):
    (trained,) = parity(found, "one_device", case)
    losses = trained["history"]["loss"]
    assert losses[-1] < losses[0] - 0.01
    if case == "cnn_sgd":
        _, mean, variance = trained["weights"][2:5]
        assert np.abs(variance - 1).max() > 0.01 and np.abs(mean).max() > 0.01


@pytest.mark.parametrize("size", tiers.cases(models.SIZES, quick=models.QUICK_SIZES))
@pytest.mark.parametrize("strategy", FURTHER_MIRRORED)
def test_evaluate_and_predict_equal_one_process(found, strategy, size):
    scenario = "inference" if size in models.QUICK_SIZES else "further_inference"
    expected = found("one_device", scenario)[0][size]
    length = 28 if size == "files" else size
    for results in found(strategy, scenario):
        for kind, (evaluation, predictions) in results[size].items():
            assert predictions.shape == (length, 3)
            assert difference(predictions, expected[kind][1]) < 1e-5, kind
            assert difference(evaluation, expected[kind][0]) < 1e-5, kind


@pytest.mark.parametrize("strategy", FURTHER_MIRRORED)
def test_an_unseeded_shuffled_epoch_has_each_example_once(found, strategy):
    numbers = np.arange(96, dtype=np.float64)
    for results in found(strategy, "coverage"):
        for exponent in range(4):
            sums = results[f"power{exponent}"]
            assert np.allclose(sums, (numbers**exponent).sum(), rtol=1e-6), exponent


def masks(found, strategy):
    return np.concatenate(found(strategy, "dropout"), axis=2)


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_dropout_masks_differ_between_replicas_and_steps_and_not_between_runs(found, strategy):
    drawn = masks(found, strategy)
    assert drawn.shape == (2, 2, 2, 8, 40)
    assert (drawn[0] == drawn[1]).all(), "two runs of one seed"
    views = [drawn[0][step, replica] for step in range(2) for replica in range(2)]
    for i, a in enumerate(views):
        assert 0.35 < a.mean() < 0.65
        for b in views[:i]:
            # Independent masks agree in half of their elements.
            assert 0.35 < (a == b).mean() < 0.65


def test_dropout_masks_are_those_of_another_program_with_the_seed(found):
    assert (masks(found, "mirrored") == masks(found, "multi_worker_mirrored")).all()


# A bare fit runs the step that the Trainer's does.
@pytest.mark.parametrize("way", tiers.cases(["trainer", "bare", "eager"], quick=["trainer"]))
@pytest.mark.parametrize("strategy", FURTHER_MIRRORED[1:])
def test_replicas_and_steps_draw_numbers_of_their_own(found, strategy, way):
    noise = found(strategy, "noise" if way == "trainer" else "further_noise")
    first, again = (
        np.concatenate([results["draws"][way, attempt] for results in noise], axis=1) for attempt in range(2)
    )
    assert first.shape == (3, 2, 5, 16)
    assert (first == again).all(), "two runs of one seed"
    for kind in range(5):
        views = first[:, :, kind].reshape(6, 16)
        assert len(np.unique(views, axis=0)) == 6, kind


@pytest.mark.parametrize("strategy", FURTHER_MIRRORED[1:])
def test_a_state_tree_gives_each_replica_its_seed_back(found, strategy):
    noise = found(strategy, "noise")
    assert [each["after"] for each in noise] == [each["before"] for each in noise]
    assert len({state[0] for each in noise for state in each["after"]}) == 2


# The Trainer: equal ranks, one file, anybody's callbacks.


@pytest.fixture(scope="module", params=FURTHER_MIRRORED[1:])
def run(request, runs):
    further = models.FURTHER[request.param] if request.param == "mirrored" else ()
    return runs(request.param, "program", *further)


# In one process there is nobody for a callback to wait for, and nobody who lacks it.
@pytest.fixture(scope="module", params=[pytest.param("mirrored", marks=pytest.mark.slow), "multi_worker_mirrored"])
def with_callbacks(request, runs):
    return runs(request.param, "program", "callbacks")


def test_variables_are_bitwise_equal_on_all_ranks(run):
    ranks, _ = run
    for results in ranks:
        assert bitwise_equal(results["everything"]["variables"], ranks[0]["everything"]["variables"])
        assert bitwise_equal(results["everything"]["history"], ranks[0]["everything"]["history"])
        for components, first in zip(
            results["everything"]["statistics"], ranks[0]["everything"]["statistics"], strict=True
        ):
            assert all(bitwise_equal(component, first[0]) for component in components), "on every replica"
    # Kernel, 4 of BatchNorm, kernel, bias; iterations, learning rate, 2 slots for each of 5 trainable variables.
    assert len(ranks[0]["everything"]["variables"]) == 7 + 2 + 10


def test_one_rank_is_chief(run):
    ranks, _ = run
    assert [results["is_chief"] for results in ranks] == [True] + [False] * (len(ranks) - 1)


def test_saved_model_loads_in_plain_keras_with_its_optimizer_and_predictions(run):
    ranks, out = run
    expected = ranks[0]["everything"]
    x = np.random.default_rng(0).standard_normal((96, 12), np.float32)
    assert not list(out.glob("*partial*"))
    for name in ("model.keras", "chief.keras"):
        model = keras.models.load_model(out / name)
        assert difference(model.predict(x[:45], verbose=0), expected["predictions"]) < 1e-6
        loaded = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
        assert bitwise_equal(loaded, expected["variables"])
        assert model.optimizer.iterations.numpy() == 6
    assert all(results["everything"]["saved"]["there"] for results in ranks)


def test_exported_model_is_served_in_another_process(run):
    ranks, out = run
    x = np.random.default_rng(0).standard_normal((96, 12), np.float32)
    loaded = tf.saved_model.load(out / "exported/1")
    (served,) = loaded.signatures["serving_default"](tf.constant(x[:45])).values()
    assert difference(served.numpy(), ranks[0]["everything"]["predictions"]) < 1e-6
    assert [path.name for path in (out / "exported").iterdir()] == ["1"]


def test_validation_equals_evaluate_and_the_saved_model(run):
    ranks, out = run
    expected = ranks[0]["everything"]
    last = [expected["history"][name][-1] for name in ("val_loss", "val_accuracy")]
    assert difference(last, expected["evaluation"]) < 1e-6
    model = keras.models.load_model(out / "model.keras")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((96, 12), np.float32), rng.integers(0, 3, 96).astype(np.int32)
    assert difference(model.evaluate(x[:45], y[:45], verbose=0), expected["evaluation"]) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("who", ["every", "chief"])
def test_callbacks_on_every_rank_or_on_the_chief_alone(with_callbacks, who):
    ranks, out = with_callbacks
    first = ranks[0]["callbacks"][who]
    for results in ranks:
        mine = results["callbacks"][who]
        assert mine["epochs"] == [0, 1], "EarlyStopping stops all ranks after the second epoch"
        assert mine["history"] == first["history"]
        assert mine["print"] == first["print"], "restored weights hold on all ranks"
        assert mine["rate"] == first["rate"]
    assert first["rate"] == pytest.approx(0.01 if who == "chief" else 0.05)
    folder = out / who
    files = {path.name for path in folder.iterdir()} - {"tensorboard"}
    assert files >= {"checkpoint-1.keras", "checkpoint-2.keras", "best.keras", "log.csv"}
    assert len((folder / "log.csv").read_text().splitlines()) == 1 + 2
    assert len(list((folder / "tensorboard" / "train").iterdir())) == 1, "one writer"
    for path in folder.glob("*.keras"):
        keras.models.load_model(path)
    if who == "chief":
        assert "step.keras" in files
        assert (out / "step.weights.h5").exists()


@pytest.mark.full
def test_early_stopping_restored_the_first_epochs_weights(with_callbacks):
    _, out = with_callbacks
    first, second = (keras.models.load_model(out / "every" / f"checkpoint-{epoch}.keras") for epoch in (1, 2))
    assert difference(first.get_weights(), second.get_weights()) > 1e-4


@pytest.mark.full
def test_progress_is_shown_on_the_chief_alone(runs):
    _, out = runs("multi_worker_mirrored", "program", "callbacks")
    assert "Epoch 2/5" in (out / "logs" / "worker-0.log").read_text()
    assert "Epoch" not in (out / "logs" / "worker-1.log").read_text()


def test_fine_tuning_a_loaded_model_equals_one_process(run, found):
    (expected,) = found("one_device", "fine_tuning")
    for results in run[0]:
        assert difference(results["fine_tuning"], expected) < 1e-5
