"""Schedules, scaled learning rates and accumulation: two replicas train as plain arithmetic with the large batch does."""

import math
import zipfile

import keras
import numpy as np
import pytest

import tfdist
from tests.helpers import tiers
from tfdist.config import OptimizerConfig, ScheduleConfig, TrainConfig
from tfdist.errors import ConfigError
from tfdist.gradients.configured_optimizer import build_optimizer
from tfdist.gradients.schedules import WarmUp, build_schedule

RATE, REPLICAS, BATCH, STEPS, EPOCHS = 0.01, 2, 8, 8, 3
rng = np.random.default_rng(3)
X = rng.standard_normal((BATCH * STEPS, 3)).astype(np.float32)
Y = rng.standard_normal((BATCH * STEPS, 1)).astype(np.float32)


def cosine(u, total, warmup):
    share = min((u - warmup) / (total - warmup), 1)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share))


SCHEDULES = {
    "constant": ({}, lambda u, total, warmup: 1),
    "cosine": ({"end": 0.1}, cosine),
    "step": (
        {"boundaries": "0.5,0.75", "factor": "0.1,0.5"},
        lambda u, total, warmup: 1 if u < total // 2 else 0.1 if u < total * 3 // 4 else 0.05,
    ),
    "polynomial": (
        {"end": 0.1, "power": 2.0},
        lambda u, total, warmup: 0.1 + 0.9 * (1 - (u - warmup) / (total - warmup)) ** 2,
    ),
}


def rates(name, rate, total, warmup):
    """Returns the rate of each update by plain arithmetic."""
    return [rate * (u / warmup if u < warmup else SCHEDULES[name][1](u, total, warmup)) for u in range(total)]


def trained_plainly(found, batch):
    """Returns the weights and bias of a linear model after SGD with these rates."""
    w, b = np.full((3, 1), 0.5), np.zeros(1)
    for number, rate in enumerate(found):
        rows = slice(number * batch % len(X), number * batch % len(X) + batch)
        error = X[rows] @ w + b - Y[rows]
        w, b = w - rate * 2 * X[rows].T @ error / batch, b - rate * 2 * error.mean(0)
    return w, b


CASES = [(name, warmup, accumulation) for name in SCHEDULES for warmup in (0, 3) for accumulation in (0, 2)]


@pytest.mark.parametrize(
    ("name", "warmup", "accumulation"),
    tiers.cases(CASES, quick=[("cosine", 3, 2)]),
)
def test_two_replicas_train_as_plain_arithmetic_with_the_large_batch(mirrored, tmp_path, name, warmup, accumulation):
    schedule = ScheduleConfig(name, warmup_steps=warmup, **SCHEDULES[name][0])
    optimizer = OptimizerConfig("sgd", gradient_accumulation_steps=accumulation)
    config = TrainConfig(
        learning_rate=RATE, learning_rate_scaling="linear", schedule=schedule, optimizer=optimizer, epochs=EPOCHS
    )
    trainer = tfdist.Trainer(mirrored)
    with trainer.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.5))]
        )
        model.compile(build_optimizer(config, REPLICAS, STEPS), "mse")
    trainer.fit(model, X, Y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    n = accumulation or 1
    total = STEPS * EPOCHS // n
    expected = trained_plainly(rates(name, RATE * REPLICAS, total, warmup), BATCH * n)
    for found, plain in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, plain, atol=1e-5)

    trainer.save(model, tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        assert b"tfdist" not in archive.read("config.json"), "plain Keras loads it"
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer).__module__.startswith("keras.")
    now, then = (keras.ops.convert_to_numpy(each.optimizer.learning_rate) for each in (loaded, model))
    np.testing.assert_allclose(now, then, rtol=1e-5)


@pytest.mark.parametrize(("name", "warmup", "n"), [(name, w, n) for name in SCHEDULES for w in (0, 3) for n in (1, 3)])
def test_the_rate_of_each_update_is_that_of_plain_arithmetic(name, warmup, n):
    schedule = build_schedule(ScheduleConfig(name, warmup_steps=warmup, **SCHEDULES[name][0]), RATE, 4 * n, 4, n)
    found = [float(schedule(u * n + n - 1)) if callable(schedule) else schedule for u in range(16)]
    np.testing.assert_allclose(found, rates(name, RATE, 16, warmup), rtol=1e-5, atol=1e-9)


def test_a_warm_up_is_of_a_class_of_its_own_that_its_configuration_makes_again():
    config = ScheduleConfig("polynomial", warmup_steps=4)
    schedule = build_schedule(config, RATE, 8, 2)
    assert type(schedule) is schedule.__class__ is WarmUp
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert type(again) is WarmUp
    np.testing.assert_array_equal([again(u) for u in range(16)], [schedule(u) for u in range(16)])


def test_a_warm_up_goes_on_after_a_model_was_saved_within_it(mirrored, tmp_path):
    """The file holds Keras' schedule; the training that continues, and its graph, the warm-up."""
    trainer = tfdist.Trainer(mirrored)
    rates = {}
    for saved in (False, True):
        with trainer.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            schedule = build_schedule(ScheduleConfig("polynomial", warmup_steps=12), RATE, STEPS, EPOCHS)
            model.compile(keras.optimizers.SGD(schedule), "mse")
        path = str(tmp_path / "within.keras")
        callbacks = [keras.callbacks.ModelCheckpoint(path, save_freq=1)] if saved else []
        trainer.fit(model, X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        trainer.fit(model, X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        rates[saved] = float(model.optimizer.learning_rate), *model.get_weights()[0].ravel()
    assert rates[True] == rates[False]
    with zipfile.ZipFile(path) as archive:
        assert b"tfdist" not in archive.read("config.json")


def test_a_warm_up_may_be_given_in_epochs_and_rates_by_the_square_root():
    config = TrainConfig(learning_rate=0.5, learning_rate_scaling="sqrt", schedule=ScheduleConfig(warmup_epochs=0.5))
    rate = build_optimizer(config, replicas=4, steps_per_epoch=8).get_config()["learning_rate"]["config"]
    assert (rate["warmup_target"], rate["warmup_steps"]) == (1.0, 4)


@pytest.mark.parametrize("fields", [{"name": "cosine"}, {"warmup_epochs": 1.0}, {"name": "step", "boundaries": "0.5"}])
def test_unknown_steps_are_one_sentence(fields):
    with pytest.raises(
        ConfigError, match=r"depends on the steps of the run, and .*: set steps_per_epoch, or count updates"
    ):
        build_schedule(ScheduleConfig(**fields), RATE)
    assert callable(build_schedule(ScheduleConfig("cosine", decay_steps=8), RATE))


def test_a_warm_up_that_leaves_no_update_is_one_sentence():
    with pytest.raises(ConfigError, match=r"The warm-up of 9 updates leaves none of the run's 8 for schedule 'cosine'"):
        build_schedule(ScheduleConfig("cosine", warmup_steps=9), RATE, 4, 2)


def test_a_warm_up_that_is_longer_than_the_run_is_a_warning(caplog):
    build_schedule(ScheduleConfig(warmup_steps=10), 0.1, steps_per_epoch=10, epochs=1)
    assert not caplog.messages
    build_schedule(ScheduleConfig(warmup_steps=11), 0.1, steps_per_epoch=10, epochs=1)
    (said,) = caplog.messages
    assert said.startswith(
        "the warm-up of 11 updates is longer than the run of 10: the learning rate does not reach 0.1;"
    )


def test_a_boundary_behind_the_run_is_a_warning(caplog):
    build_schedule(ScheduleConfig("step", boundaries="3,10"), 0.1, steps_per_epoch=10, epochs=1)
    assert not caplog.messages
    build_schedule(ScheduleConfig("step", boundaries="3,11"), 0.1, steps_per_epoch=10, epochs=1)
    (said,) = caplog.messages
    assert said.startswith(
        "schedule.boundaries has 11, which is after the run's 10 updates: the learning rate does not"
    )
