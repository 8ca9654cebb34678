"""`tfdist train` with recipes: commands train what plain arithmetic trains, and end with one sentence."""

import json

import keras
import numpy as np
import pytest

from tests.end_to_end.test_train import finish, start
from tests.helpers import linear_task, tiers

WHERE = {
    "alone": (),
    "workers": ("--config.strategy.name=multi_worker_mirrored", "--config.cluster.workers=2"),
    "servers": ("--config.strategy.name=parameter_server", "--config.cluster.workers=1", "--config.cluster.ps=1"),
}
LINEAR = ("--config=default", "--config.task=tests.helpers.linear_task:Linear", "--config.optimizer.name=sgd")
LINEAR += ("--config.epochs=1", "--config.global_batch_size=8", "--config.learning_rate=0.02")


def run(workdir, *options, code=0):
    """Returns what a command has printed, once it has ended with this code."""
    is_one_process = not any(option.startswith("--config.cluster.workers=") for option in options)
    process = start(*options, f"--workdir={workdir}", forked=is_one_process)
    output = finish(process)
    assert process.returncode == code, output
    assert "Traceback" not in output
    return output


STOPPED = ("--config.callbacks=EarlyStopping(monitor=loss, patience=1, min_delta=10)", "--config.epochs=9")


def assert_stopped(output):
    assert "Epoch 1/9" in output and "Epoch 3/9" not in output


def assert_trained(workdir, expected):
    for found, plain in zip(keras.models.load_model(workdir / "model.keras").get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, plain, atol=1e-5)


@pytest.mark.parametrize("where", tiers.cases(["alone", "workers"], quick=1))
def test_skip_trains_what_a_plain_loop_without_the_batch_trains(tmp_path, where):
    output = run(tmp_path, *LINEAR, *WHERE[where], "--config.task_options.nan_step=2", "--config.nan_policy=skip")
    assert "skipped updates: 1" in output
    assert_trained(tmp_path, linear_task.trained_plainly([0.02] * 8, left_out=[2]))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["skipped_updates"] == 1 and summary["metrics"]["loss"] is not None


@pytest.mark.parametrize("where", tiers.cases(WHERE, quick=["alone"]))
def test_stop_ends_all_ranks_with_one_sentence(tmp_path, where):
    output = run(
        tmp_path, *LINEAR, *WHERE[where], "--config.task_options.nan_step=2", "--config.nan_policy=stop", code=1
    )
    said = [line for line in output.splitlines() if "is not finite, and nan_policy is 'stop'" in line]
    assert said, output
    if where != "servers":  # of which the loss comes some steps later
        assert all("Step 3 of epoch 1: the loss is not finite" in line for line in said)


@pytest.mark.full
@pytest.mark.parametrize("accumulation", [0, 2])
@pytest.mark.parametrize("where", ["workers", "servers"])
def test_schedules_train_what_plain_arithmetic_does_with_the_large_batch(tmp_path, where, accumulation):
    if where == "servers" and accumulation:
        return  # which parameter_server refuses
    schedule = {"name": "polynomial", "end": 0.25, "power": 2.0, "warmup_steps": 2}
    flags = [f"--config.schedule.{name}={value}" for name, value in schedule.items()]
    flags += ["--config.epochs=2", f"--config.optimizer.gradient_accumulation_steps={accumulation}"]
    flags += ["--config.learning_rate_scaling=linear"] * (where == "workers")
    run(tmp_path, *LINEAR, *WHERE[where], *flags)
    each = accumulation or 1
    rate, total = 0.02 * (2 if where == "workers" else 1), 16 // each
    after = [0.25 + 0.75 * (1 - n / (total - 2)) ** 2 for n in range(total - 2)]
    rates = [0, rate / 2, *(rate * share for share in after)]
    assert_trained(tmp_path, linear_task.trained_plainly(rates, batch=8 * each))


@pytest.mark.full
@pytest.mark.parametrize("where", WHERE)
def test_data_without_a_batch_are_one_sentence(tmp_path, where):
    output = run(tmp_path, *LINEAR, *WHERE[where], "--config.task_options.empty=true", code=2)
    said = "returns has 0 batches" if where == "servers" else "The training data hold no batch."
    assert said in output


@pytest.mark.full  # alone, the training that begins with initial weights has one, too
@pytest.mark.parametrize("where", ["alone", "workers"])
def test_callbacks_are_named_by_a_flag(tmp_path, where):
    output = run(tmp_path, *LINEAR, *WHERE[where], *STOPPED)
    assert_stopped(output)


@pytest.mark.parametrize("suffix", tiers.cases([".keras", ".weights.h5"], quick=1))
@pytest.mark.parametrize("where", tiers.cases(WHERE, quick=1))
def test_a_training_begins_with_initial_weights(tmp_path, where, suffix):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    path = tmp_path / f"begin{suffix}"
    (model.save if suffix == ".keras" else model.save_weights)(path)
    options = [f"--config.initial_weights={path}", "--config.learning_rate=0", *(STOPPED if where == "alone" else ())]
    output = run(tmp_path, *LINEAR, *WHERE[where], *options)
    assert_trained(tmp_path, model.get_weights())
    if where == "alone":
        assert_stopped(output)


@pytest.mark.parametrize("name", tiers.cases(["other.weights.h5", "none.keras"], quick=1))
def test_a_file_that_is_not_there_or_of_another_model_is_one_sentence(tmp_path, name):
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    other.save_weights(tmp_path / "other.weights.h5")
    output = run(tmp_path, *LINEAR, f"--config.initial_weights={tmp_path}/{name}", code=2)
    assert f"{name}' cannot be loaded into model " in output
