"""How a supervised training ends: a task is killed once its model is saved, or leaves its `fit` with exit code 0."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.helpers import tiers

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import hashlib, json, os, pathlib, signal, sys, time
import keras, numpy as np, tfdist
from tfdist.runtime.report import progress

strategy, how = sys.argv[1:]
life = progress.restarts()
ranks = range(len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]))
x = np.random.default_rng(0).uniform(-1, 1, (32, 2)).astype("float32")

class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print(f"STEP {life}", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        if how == "amid the second" and os.path.exists("model.keras") and life == 0 and epoch == 1:
            while not os.path.exists("backup/fit-2/step-2-end/manifest.json"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

def new_trainer():
    return tfdist.Trainer(strategy, backup_dir="backup")

def new_model(trainer):
    with trainer.scope():
        model = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    return model

def fit(trainer, model):
    history = trainer.fit(model, x, x.sum(axis=1), batch_size=16, epochs=2, verbose=0, callbacks=[Count()])
    weights = hashlib.sha256(b"".join(each.tobytes() for each in model.get_weights())).hexdigest()
    print(f"MODEL {weights} {history.history} {history.epoch}", flush=True)

def die():
    if life == 0 and ranks[-1] == json.loads(os.environ["TF_CONFIG"])["task"]["index"]:
        while not os.path.exists("model.keras"):  # the chief's
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

trainer = new_trainer()
model = new_model(trainer)
fit(trainer, model)
if how == "own save":
    if trainer.is_chief:
        model.save("model.keras")
elif how == "two fits":
    trainer.save(model, "model.keras")
    fit(trainer, model)
    trainer.save(model, "model.keras")
elif how == "fit between":
    trainer.save(model, "model.keras")
    die()
    fit(trainer, model)
    trainer.save(model, "model.keras")
elif how in ("two trainers", "amid the second"):
    trainer.save(model, "model.keras")
    trainer = new_trainer()
    model = new_model(trainer)
    fit(trainer, model)
    trainer.save(model, "model.keras")
elif how == "delete":
    trainer.save(model, "model.keras")
    trainer.delete_backup()
elif how == "keep":
    trainer.save(model, "model.keras", delete_backup=False)
else:
    trainer.save(model, "model.keras")
die()
"""

CASES = [  # strategy, how the model is saved, steps of a task before and after the restart, of the next run; whether backups stay
    (("multi_worker_mirrored", "save", (4, 0, 4), False), 2),
    (("mirrored", "amid the second", (8, 2, 8), False), 1),
    (("mirrored", "own save", (4, 0, 4), False), 1),
    (("mirrored", "two fits", (8, 0, 8), False), 1),
    (("mirrored", "fit between", (4, 4, 8), False), 1),
    (("mirrored", "two trainers", (8, 0, 8), False), 1),
    (("mirrored", "delete", (4, 4, 4), False), 1),
    (("mirrored", "keep", (4, 0, 0), True), 1),
    (("multi_worker_mirrored", "own save", (4, 0, 4), False), 2),
    (("multi_worker_mirrored", "two fits", (8, 0, 8), False), 2),
    (("multi_worker_mirrored", "two trainers", (8, 0, 8), False), 2),
    (("multi_worker_mirrored", "delete", (4, 4, 4), False), 2),
]


@pytest.mark.parametrize(
    ("strategy", "how", "steps", "stay", "workers"), tiers.cases([(*case, n) for case, n in CASES], quick=2)
)
def test_what_has_finished_is_not_trained_again(tmp_path, strategy, how, steps, stay, workers):
    (tmp_path / "script.py").write_text(SCRIPT)
    first = launch(tmp_path, f"--workers={workers}", "--max_restarts=1", sys.executable, "script.py", strategy, how)
    assert "restart 1/1 from step" in first
    assert (tmp_path / "backup").exists() == stay
    next_run = SCRIPT.replace("def die():", "def die():\n    return").replace("epoch == 1", "False")
    (tmp_path / "script.py").write_text(next_run)
    second = launch(tmp_path, f"--workers={workers}", sys.executable, "script.py", strategy, how)
    counts = collections.Counter(re.findall(r"STEP (\d)", first))
    assert (counts["0"], counts["1"], second.count("STEP 0")) == tuple(workers * each for each in steps), first + second
    assert (tmp_path / "backup").exists() == stay
    if steps[1] == 0 or how in (
        "fit between",
        "amid the second",
    ):  # the models and histories of both lives, of all workers
        models = re.findall(r"MODEL (.*)", first)
        assert len(set(models)) == (2 if steps[2] == 8 else 1) and len(models) >= 2 * workers, first


KILLER = """
import atexit, json, os, pathlib, signal, threading, time
import keras

INDEX = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

def kill(when):
    while when != "exit" and not os.path.exists(when):
        time.sleep(0.0005)
    pathlib.Path("killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)

class Killer(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("STEP", flush=True)

    def on_train_end(self, logs=None):
        if INDEX == 1 and not os.path.exists("killed"):
            when = os.environ["WHEN"]
            atexit.register(kill, when) if when == "exit" else threading.Thread(target=kill, args=(when,), daemon=True).start()
"""


@pytest.mark.parametrize("when", tiers.cases(["exit", "run/model.keras", "run/summary.json"], quick=1))
def test_a_finished_run_of_tfdist_train_is_not_trained_again(tmp_path, when):
    (tmp_path / "killer.py").write_text(KILLER)
    options = ["--config=digits_multi_worker", "--workdir=run", "--config.epochs=1", "--config.steps_per_epoch=5"]
    options += ["--config.callbacks=killer:Killer", "--config.max_restarts=1"]
    code, output = run(tmp_path, "train", *options, WHEN=when)
    assert code == 0 and output.count("lost at step 5 (killed by SIGKILL); restart 1/1 from step 5") == 1, output
    logs = [(tmp_path / "run" / "logs" / f"worker-{index}.log").read_text() for index in range(2)]
    assert [log.count("STEP") for log in logs] == [5, 5]
    assert not (tmp_path / "run" / "backup").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["restarts"]) == (5, 1)
    if when != "run/model.keras":  # what the first process has measured stays
        assert summary["examples_per_second"] and summary["goodput"]["seconds"]["compilation"]


ENDS = """
import ctypes, os, sys
import keras, numpy as np, tfdist

how = sys.argv[1]
trainer = tfdist.Trainer("mirrored")
x = np.random.default_rng(0).uniform(-1, 1, (64, 2)).astype("float32")
with trainer.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")

class Ends(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2 and how == "os":
            os._exit(0)
        if batch == 2 and how == "c":
            ctypes.CDLL(None)._exit(0)
        if batch == 2 and how == "caught":
            raise KeyError("enough")

try:
    trainer.fit(model, x, x.sum(axis=1), batch_size=16, epochs=2, verbose=0, callbacks=[Ends()])
except KeyError:
    step = trainer.step(lambda batch: {}, uses=[model])
    loop = step.loop(x, batch_size=16)
    next(loop)  # and left as it is
if how == "after":
    os._exit(0)
"""
LOST = "worker:0 failed with exit code 0 before the training has finished (step 2, epoch 1); ending all tasks. Full output: "


@pytest.mark.parametrize(
    ("how", "code", "said"),
    tiers.cases([("caught", 0, ""), ("os", 1, LOST), ("after", 0, ""), ("c", 1, LOST)], quick=1),
)
def test_a_script_that_leaves_its_fit_with_exit_code_0_has_failed(tmp_path, how, code, said):
    (tmp_path / "script.py").write_text(ENDS)
    done, output = run(tmp_path, "launch", sys.executable, "script.py", how)
    assert done == code and said in output, output
    assert ("model.stop_training = True" in output) == bool(code)


def launch(folder, *arguments):
    code, output = run(folder, "launch", *arguments)
    assert code == 0, output
    return output


def run(folder, *arguments, **variables):
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", **variables}
    environ.pop("TF_CONFIG", None)
    command = [sys.executable, "-m", "tfdist", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200
    )
    return done.returncode, done.stdout.decode()
