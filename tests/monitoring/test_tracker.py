"""Trackers: the parameters and metrics of a run, in one record also after a kill."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import ClassVar

import keras
import numpy as np
import pytest

import tfdist
from tfdist.config import TrainConfig, validation
from tfdist.errors import ConfigError
from tfdist.monitoring import Tracker

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ["--config=digits", "--config.steps_per_epoch=2", "--config.epochs=3", "--config.backup.save_freq=epoch"]
MODULE = """
import json, os, signal
import keras

class Lines:
    def start(self, parameters, run_id):
        self.write("start", run_id, parameters["optimizer.name"])
        return run_id or "record-1"

    def log(self, metrics, step):
        self.write("log", step, sorted(metrics))

    def finish(self):
        self.write("finish")

    def write(self, *line):
        with open("lines.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")

class KillOnce(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def train_with_a_kill(folder, tracker):
    """Trains until a kill in the third epoch, and again; the second process resumes."""
    (folder / "tracker_module.py").write_text(MODULE)
    flags = ["--workdir=run", "--config.callbacks=tracker_module:KillOnce", f"--config.monitoring.tracker={tracker}"]
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    for expected in (-signal.SIGKILL, 0):
        ended = subprocess.run(
            [sys.executable, "-m", "tfdist.train", *CONFIG, *flags],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == expected, ended.stderr
    return json.loads((folder / "run/summary.json").read_text())


@pytest.mark.full
def test_a_killed_run_goes_on_in_its_record(tmp_path):
    summary = train_with_a_kill(tmp_path, "tracker_module:Lines")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    name = TrainConfig().optimizer.name
    assert [line for line in lines if line[0] != "log"] == [
        ["start", "", name],
        ["start", "record-1", name],
        ["finish"],
    ]
    logged = {step: metrics for _, step, metrics in lines[1:-1] if isinstance(step, int)}
    assert sorted(logged) == [0, 1, 2]
    assert all(metrics == sorted(summary["metrics"]) for metrics in logged.values())


def test_mlflow_has_one_run_of_both_processes(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    place = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    summary = train_with_a_kill(tmp_path, "mlflow")
    (run,) = mlflow.MlflowClient(place).search_runs(["0"])
    history = mlflow.MlflowClient(place).get_metric_history(run.info.run_id, "val_loss")
    assert {each.step for each in history} == {0, 1, 2}
    assert (run.info.status, run.data.metrics) == ("FINISHED", pytest.approx(summary["metrics"]))
    assert run.data.params["optimizer.name"] == TrainConfig().optimizer.name


class Recording:
    """A tracker that keeps what it is told."""

    told: ClassVar = []

    def start(self, parameters, run_id):
        self.told.append(run_id)
        return "record-1"

    def log(self, metrics, step):
        self.told.append(step)

    def finish(self):
        pass


def test_further_fits_count_on_in_the_record(monkeypatch):
    monkeypatch.setattr(Recording, "told", [])
    trainer = tfdist.Trainer("one_device")
    with trainer.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    tracker = Tracker(f"{__name__}:Recording")

    def fit(tracker, **epochs):
        trainer.fit(model, np.ones((4, 1)), np.ones((4, 1)), callbacks=[tracker], verbose=0, **epochs)

    fit(tracker, epochs=2)
    fit(tracker, epochs=4, initial_epoch=2)  # the epochs after those of the record
    fit(tracker, epochs=2)
    assert Recording.told == ["", 0, 1, "record-1", 2, 3, "record-1", 4, 5]
    # A process that resumes the third `fit` at its second epoch, from a backup of before or after the record of its first.
    for next_step in (4, 5):
        resumed = Tracker(f"{__name__}:Recording")
        resumed.load_state_dict({**tracker.state_dict(), "next_step": next_step})
        fit(resumed, epochs=2, initial_epoch=1)
        assert Recording.told[-2:] == ["record-1", 5]


def test_a_tracker_that_fails_ends_no_training(monkeypatch, caplog):
    class Failing:
        def start(self, parameters, run_id):
            return "x"

        def log(self, metrics, step):
            raise OSError("no server")

        def finish(self):
            pass

    monkeypatch.setattr(sys.modules[__name__], "Failing", Failing, raising=False)
    trainer = tfdist.Trainer("one_device")
    with trainer.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    tracker = Tracker(f"{__name__}:Failing")
    trainer.fit(model, np.ones((4, 1)), np.ones((4, 1)), epochs=2, callbacks=[tracker], verbose=0)
    assert sum("missing in tests.monitoring.test_tracker:Failing: " in each for each in caplog.messages) == 2
    assert tracker.run_id == "x"


def test_a_tracker_that_is_unknown_or_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = TrainConfig()
    config.monitoring.tracker = "mlflw"
    with pytest.raises(ConfigError, match="did you mean 'mlflow'"):
        validation.check(config)
    with pytest.raises(ConfigError, match="needs the package trackio, which is not installed"):
        Tracker("trackio")
