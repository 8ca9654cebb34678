"""`tfdist.ExportBest`: the weights of the best epoch are served, whenever the training is killed, and it changes nothing else."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers.launched_job import until
from tests.helpers.reused_model import ReusedModel
from tfdist import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
rng = np.random.default_rng(0)
X = rng.standard_normal((64, 4), np.float32)
Y = X.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


@pytest.fixture(scope="module")
def reused(trainer):
    with trainer.scope():
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001), "mse", metrics=["mae"])
    return ReusedModel(model)


@pytest.fixture
def new_model(reused):
    """Returns a function that returns the model as it was at first."""

    def reset():
        keras.utils.set_random_seed(1)
        return reused.reset()

    return reset


def fit(trainer, model, *callbacks, epochs=4, **arguments):
    arguments = {"validation_data": (X, Y), **arguments}
    return trainer.fit(model, X, Y, batch_size=16, epochs=epochs, verbose=0, callbacks=[*callbacks], **arguments)


def forward(weights, x):
    """The model's predictions, in plain arithmetic."""
    first, bias, gamma, beta, mean, variance, second, last = (each.astype(np.float64) for each in weights)
    return (gamma * (x @ first + bias - mean) / np.sqrt(variance + 1e-3) + beta) @ second + last


class Spoil(keras.callbacks.Callback):
    """Keeps each epoch's weights; from one epoch on training begins with worse ones."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch, self.weights = epoch, []

    def on_epoch_begin(self, epoch, logs=None):
        if epoch >= self.epoch:
            self.model.set_weights([3 * each for each in self.model.get_weights()])

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append([np.array(each) for each in self.model.get_weights()])


class Interrupted(Exception):
    """In place of a kill."""


class Interrupt(keras.callbacks.Callback):
    """Interrupts at the end of an epoch, after callbacks and before the backup."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Interrupted


def about(path):
    (version,) = path.iterdir()
    assert sorted(each.name for each in version.iterdir()) == [
        *("assets", "assets.extra", "fingerprint.pb", "saved_model.pb", "variables")
    ]
    return int(version.name), json.loads((version / "assets.extra" / "tfdist.json").read_text())


def test_the_best_epochs_weights_are_served_and_the_training_is_the_same(trainer, new_model, tmp_path):
    trained = []
    for callbacks in ([], [tfdist.ExportBest(tmp_path / "best", "val_mae")]):
        spoil = Spoil(epoch=2)
        history = fit(trainer, new_model(), spoil, *callbacks, epochs=3).history
        trained.append((history, [each.tobytes() for weights in spoil.weights for each in weights]))
    assert trained[0] == trained[1]
    assert history["val_mae"][1] == min(history["val_mae"]) < min(history["val_mae"][2:]) / 1.1
    version, told = about(tmp_path / "best")
    assert (version, told["epoch"]) == (2, 2)
    assert told["metrics"] == pytest.approx({name: values[1] for name, values in history.items()})
    x = rng.standard_normal((45, 4), np.float32)
    (served,) = tf.saved_model.load(tmp_path / "best" / "2").signatures["serving_default"](tf.constant(x)).values()
    assert np.abs(served - forward(spoil.weights[1], x)).max() < 1e-6
    assert np.abs(served - forward(spoil.weights[2], x)).max() > 0.1


# Just after an export that no backup knows of; long after the best.
@pytest.mark.full
@pytest.mark.parametrize("interrupted", [1, 3])
def test_a_training_that_goes_on_remembers_the_best(trainer, new_model, tmp_path, interrupted):
    best, backup = tmp_path / "best", {"backup_dir": tmp_path / "backup", "config": {}}
    with pytest.raises(Interrupted):
        after = Interrupt(interrupted)
        fit(trainer, new_model(), Spoil(2), tfdist.ExportBest(best), after, tfdist.BackupAndRestore(**backup), epochs=5)
    assert about(best)[1]["epoch"] == 2
    if interrupted == 1:  # a kill just after the export may come before the removal of the one before
        shutil.copytree(best / "2", best / "1")
    written = (best / "2" / "saved_model.pb").stat().st_mtime_ns
    callback = tfdist.ExportBest(best)
    history = fit(trainer, new_model(), Spoil(2), callback, tfdist.BackupAndRestore(**backup), epochs=5).history
    assert about(best)[1]["epoch"] == 2 and (best / "2" / "saved_model.pb").stat().st_mtime_ns == written
    assert callback.best == min(history["val_loss"]) == history["val_loss"][1]


@pytest.mark.full
def test_a_new_training_replaces_the_export_of_the_one_before_and_nothing_else(trainer, new_model, tmp_path):
    (tmp_path / "3").mkdir()  # another's
    (tmp_path / "7.0123abcd.partial").mkdir()  # left by a kill
    fit(trainer, new_model(), tfdist.ExportBest(tmp_path), epochs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "5"]
    fit(trainer, new_model(), Spoil(1), tfdist.ExportBest(tmp_path), epochs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6"]


@pytest.mark.full
def test_what_is_not_finite_is_never_the_best(trainer, new_model, tmp_path, capsys):
    model = new_model()
    model.optimizer.learning_rate = 1e30
    fit(trainer, model, tfdist.ExportBest(tmp_path / "best"), epochs=2)
    assert "ExportBest has exported no model to" in capsys.readouterr().out
    assert not (tmp_path / "best").exists()


def test_a_metric_that_is_not_there_ends_the_first_epoch(trainer, new_model, tmp_path):
    said = r"unknown metric of ExportBest 'val_acc'.* Known: loss, mae, val_loss, val_mae\."
    with pytest.raises(ConfigError, match=said):
        fit(trainer, new_model(), tfdist.ExportBest(tmp_path, "val_acc"))


@pytest.mark.full
def test_epochs_without_validation_are_skipped(trainer, new_model, tmp_path, capsys):
    fit(trainer, new_model(), tfdist.ExportBest(tmp_path / "best"), validation_freq=2)
    assert capsys.readouterr().out.count("ExportBest waits for an epoch with validation") == 1
    assert about(tmp_path / "best")[1]["epoch"] == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("val_f2",), "mode 'auto' cannot tell whether monitor shall fall or rise; set it to 'min' or 'max'."),
        (("loss_accuracy",), "mode 'auto' cannot tell"),
        (("loss", "less"), "unknown mode 'less'"),
    ],
)
def test_a_direction_that_is_unknown_is_an_error_at_once(arguments, said):
    with pytest.raises(ConfigError, match=said):
        tfdist.ExportBest("best", *arguments)


TRAIN = """
import sys
import keras, numpy as np, tfdist
keras.config.disable_interactive_logging()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(400), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-5), "mse")
x = np.ones((8, 4), np.float32)
model.fit(x, x[:, :1], batch_size=8, epochs=100000, callbacks=[tfdist.ExportBest(sys.argv[1], "loss")])
"""


@pytest.mark.full
def test_what_is_there_is_whole_whenever_the_process_is_killed(tmp_path):
    """Here almost all time is that of exports."""
    newest = 0

    def versions():
        return sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())

    for _ in range(5):
        command = [sys.executable, "-c", TRAIN, str(tmp_path)]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
        try:
            until(functools.partial(lambda known: versions()[-1:] > [known], newest), 200)
            time.sleep(random.uniform(0, 1))
        finally:
            process.kill()
            process.wait()
        there = versions()
        assert there and there[-1] > newest
        for version in there:  # two, if the kill came before the removal of the one before
            served = tf.saved_model.load(str(tmp_path / str(version))).signatures["serving_default"]
            assert np.isfinite(next(iter(served(tf.constant(X)).values()))).all()
        newest = there[-1]
    assert len([path for path in tmp_path.iterdir() if "partial" in path.name]) <= 1
