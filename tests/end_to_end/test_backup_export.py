"""`tfdist backup`, after a run of the console script has been killed: the model that its backup holds."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.launched_job import until
from tfdist import __main__ as command
from tfdist.tasks.digits import Digits

SCRIPT = pathlib.Path(sys.executable).parent / "tfdist"
ROOT = pathlib.Path(__file__).parents[2]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def is_alive(marker):
    found = pathlib.Path("/proc").glob("[0-9]*/cmdline")
    for path in found:
        try:
            if marker.encode() in path.read_bytes():
                return True
        except OSError:
            pass
    return False


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The work directory of a run of two workers, all of whose processes were killed amid the training."""
    folder = tmp_path_factory.mktemp("killed")
    workdir = folder / "run"
    # A value that looks like a flag's name, and dashes for underscores.
    flags = [
        "--config=digits_multi_worker",
        "--workdir",
        str(workdir),
        "--config.backup.save-freq=5",
        "--config.deterministic",
    ]
    flags += ["--config.epochs=10000", "--config.backup.keep", "3"]
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen([SCRIPT, "train", *flags], cwd=folder, stdout=out, stderr=out, env=environment())
    try:
        until(lambda: process.poll() is not None or len([*workdir.glob("backup/step-*/manifest.json")]) > 1, 90)
        assert process.poll() is None, (folder / "out").read_text()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: not is_alive(str(workdir)), 30)
    return workdir


def expected(backup, x):
    """What the task's model predicts with a backup's weights, read by plain TensorFlow."""
    manifest = json.loads((backup / "manifest.json").read_text())
    readers = [tf.train.load_checkpoint(str(backup / f"rank-{rank}")) for rank in range(2)]
    shared = tf.train.load_checkpoint(str(backup / "shared"))
    values = {}
    for name in manifest["about"]["variables"]:
        keys = [f"replica-{rank}/{name}" for rank in range(2)]
        own = [r.get_tensor(key) for r, key in zip(readers, keys, strict=True) if r.has_tensor(key)]
        values[name.partition("/")[2]] = np.mean(own, axis=0) if own else shared.get_tensor(name)
    keras.backend.clear_session()  # names start again
    model = Digits(Digits.Options()).build_model()
    for variable in model.weights:
        if variable.path in values:
            variable.assign(values[variable.path])
        else:
            assert "seed" in variable.path
    return model.predict(x, verbose=0)


@pytest.mark.full
def test_the_model_of_a_killed_run_predicts_as_its_backup(killed, tmp_path):
    shown = subprocess.run(
        [SCRIPT, "backup", "show", killed, "--json"], capture_output=True, text=True, env=environment(), timeout=90
    )
    assert shown.returncode == 0, shown.stderr
    whole = [each for each in json.loads(shown.stdout)["backups"] if each["state"] == "whole"]
    assert {(each["task"], each["strategy"], each["tasks"], each["replicas"]) for each in whole} == {
        ("digits", "multi_worker_mirrored", 2, 2)
    }
    x = np.random.default_rng(0).uniform(0, 1, (16, 8, 8, 1)).astype(np.float32)
    predicted = []
    for each, step in ((whole[0], []), (whole[1], [f"--step={whole[1]['step']}"])):
        out, backup = tmp_path / f"{each['step']}.keras", killed / "backup" / each["backup"]
        # From the folder of the backups, too, whose work directory is around it.
        words = [SCRIPT, "backup", "export", killed / "backup" if step else killed, out, *step]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment(), timeout=90)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"{out}: the model of {backup}"
        keras.backend.clear_session()
        model = keras.models.load_model(out)
        predicted.append(model.predict(x, verbose=0))
        np.testing.assert_array_equal(predicted[-1], expected(backup, x))
        assert model.optimizer.iterations == 0 and model.loss
    assert not np.array_equal(*predicted)


@pytest.mark.full
def test_what_a_backup_does_not_fit_is_refused(killed, tmp_path, capsys):
    path = killed / "config.json"
    config = path.read_text()
    changed = json.loads(config)
    changed["task_options"]["filters"] = 8
    path.write_text(json.dumps(changed))
    try:
        assert command.main(["tfdist", "backup", "export", str(killed), str(tmp_path / "a.keras")]) == 2
    finally:
        path.write_text(config)
    assert "was written under another configuration: task_options is {'filters': 32" in capsys.readouterr().err
    assert command.main(["tfdist", "backup", "export", str(killed), str(tmp_path / "a.keras"), "--step=1"]) == 1
    assert "holds no complete backup of step 1." in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
