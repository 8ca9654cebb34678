"""The Trainer: equal ranks, one file, anybody's callbacks."""

import keras
import numpy as np
import pytest

from tests.multiprocess.test_strategies import bitwise_equal, difference

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["mirrored", "multi_worker_mirrored"])
def run(request, runs):
    return runs(request.param)


# In one process there is nobody for a callback to wait for, and nobody who lacks it.
@pytest.fixture(scope="module", params=[pytest.param("mirrored", marks=pytest.mark.slow), "multi_worker_mirrored"])
def with_callbacks(request, runs):
    return runs("mirrored", "program", "callbacks") if request.param == "mirrored" else runs(request.param)


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


def test_validation_equals_evaluate_and_the_saved_model(run):
    ranks, out = run
    expected = ranks[0]["everything"]
    last = [expected["history"][name][-1] for name in ("val_loss", "val_accuracy")]
    assert difference(last, expected["evaluation"]) < 1e-6
    model = keras.models.load_model(out / "model.keras")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((96, 12), np.float32), rng.integers(0, 3, 96).astype(np.int32)
    assert difference(model.evaluate(x[:45], y[:45], verbose=0), expected["evaluation"]) < 1e-6


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


def test_early_stopping_restored_the_first_epochs_weights(with_callbacks):
    _, out = with_callbacks
    first, second = (keras.models.load_model(out / "every" / f"checkpoint-{epoch}.keras") for epoch in (1, 2))
    assert difference(first.get_weights(), second.get_weights()) > 1e-4


def test_progress_is_shown_on_the_chief_alone(runs):
    _, out = runs("multi_worker_mirrored")
    assert "Epoch 2/5" in (out / "logs" / "worker-0.log").read_text()
    assert "Epoch" not in (out / "logs" / "worker-1.log").read_text()


def test_fine_tuning_a_loaded_model_equals_one_process(run, single):
    for results in run[0]:
        assert difference(results["fine_tuning"], single["fine_tuning"]) < 1e-5
