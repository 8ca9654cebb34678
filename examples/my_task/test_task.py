"""Tests of `my_task`. In its parent folder, run `python -m pytest my_task`."""

import json
import pathlib
import subprocess
import sys

import pytest

from my_task.config import get_config
from my_task.task import MyTask

FOLDER = pathlib.Path(__file__).parent


def test_the_model_takes_the_data():
    task = MyTask(MyTask.Options(units=8))
    x, y = next(iter(task.eval_data(16)))
    assert task.build_model()(x).shape == y.shape


def test_a_wrong_option_is_named():
    (fault,) = MyTask.Options(units=0).faults()
    assert fault == "task_options.units must be 1 or more. Received: 0."


@pytest.mark.parametrize("workers", [1, 2])
def test_it_learns(workers, tmp_path):
    command = [sys.executable, "-m", "tfdist.train", f"--config={FOLDER / 'config.py'}", f"--workdir={tmp_path}"]
    subprocess.run([*command, f"--config.cluster.workers={workers}"], cwd=FOLDER.parent, check=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["num_replicas"], summary["epochs"]) == (workers, get_config().epochs)
    assert summary["metrics"]["val_accuracy"] > 0.9
