"""`--config.cluster.evaluator=1`: its numbers are the training's own, and nothing that is killed makes it miss or repeat one."""

from __future__ import annotations

import json
import os
import signal

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from tests.end_to_end.test_train import finish, start
from tests.helpers import gate
from tests.helpers.launched_job import until
from tests.monitoring.test_tensorboard import curves
from tfdist.commands import train
from tfdist.tasks.digits import Digits
from tools import chaos

STEPS = 22  # of an epoch of the digits
EVALUATOR = '{"cluster": {"worker": ["localhost:1"]}, "task": {"type": "evaluator", "index": 0}}'
KEEP = ["--config.backup.keep=100", "--config.backup.delete_checkpoint=false"]


def rows(workdir):
    path = workdir / "evaluations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def process_of(task, launcher):
    """The id of the process that is a task of a launcher, or None."""
    return next((pid for name, pid, _ in chaos.tasks(launcher.pid) if name == task), None)


def check_numbers(workdir):
    """What is evaluated is what the training itself has evaluated at these steps, and what TensorBoard shows, once each."""
    found, scalars = rows(workdir), curves(workdir / "tensorboard")
    for name in ("loss", "accuracy"):
        mine = {row["step"]: row["metrics"][name] for row in found}
        trained = dict(scalars["validation"][f"evaluation_{name}_vs_iterations"])
        assert mine == pytest.approx({step: trained[step] for step in mine}, rel=1e-5, abs=1e-5)
        shown = scalars["evaluator-0"][f"evaluation_{name}_vs_iterations"]
        assert len(shown) == len(mine) and dict(shown) == pytest.approx(mine)


def check(workdir, epochs):
    """All epochs are evaluated once, in order."""
    found = rows(workdir)
    assert [row["step"] for row in found] == [STEPS * (epoch + 1) for epoch in range(epochs)]
    assert [row["epoch"] for row in found] == [epoch + 1 for epoch in range(epochs)]
    check_numbers(workdir)


def test_beside_one_training_task(tmp_path):
    arguments = ["--config=digits", "--config.epochs=2", "--config.cluster.evaluator=1", *KEEP]
    process = start(*arguments, f"--workdir={tmp_path}")
    until(lambda: process_of("evaluator:0", process), 110)
    evaluator = process_of("evaluator:0", process)
    output = finish(process)
    assert process.returncode == 0, output
    check(tmp_path, 2)
    assert "step 44 (epoch 2): accuracy" in (tmp_path / "logs" / "evaluator-0.log").read_text()
    assert "[evaluator:0] tfdist: step 44 (epoch 2)" in output
    assert not psutil.pid_exists(evaluator)


@pytest.mark.full
def test_backups_that_are_removed_are_skipped_but_the_final_model(tmp_path):
    process = start("--config=digits", "--config.cluster.evaluator=1", f"--workdir={tmp_path}")
    output = finish(process)
    assert process.returncode == 0, output
    assert not (tmp_path / "backup").exists() and "warning" not in output.lower()
    steps = [row["step"] for row in rows(tmp_path)]
    assert steps == sorted(set(steps)) and steps[-1] == json.loads((tmp_path / "summary.json").read_text())["steps"]
    check_numbers(tmp_path)


@pytest.mark.full
def test_statistics_that_differ_between_workers_are_averaged(tmp_path):
    """Between epochs, when no evaluation of the training has averaged them."""
    arguments = ["--config=digits_multi_worker", "--config.epochs=2", "--config.cluster.evaluator=1", *KEEP]
    process = start(*arguments, "--config.backup.save_freq=15", f"--workdir={tmp_path}")
    output = finish(process)
    assert process.returncode == 0, output
    (row,) = [row for row in rows(tmp_path) if row["step"] == 15]
    folder = tmp_path / "backup" / "step-15"
    shared, *ranks = (tf.train.load_checkpoint(str(folder / part)) for part in ("shared", "rank-0", "rank-1"))
    task = Digits(Digits.Options())
    keras.backend.clear_session()
    model = task.build_model()
    model.compile(**task.compile_arguments())
    names, differ = json.loads((folder / "manifest.json").read_text())["about"]["variables"], 0
    for variable in model.weights:
        (name,) = [name for name in names if name.partition("/")[2] == variable.path]
        if shared.has_tensor(name):
            variable.assign(shared.get_tensor(name))
        else:
            first, second = (rank.get_tensor(f"replica-{number}/{name}") for number, rank in enumerate(ranks))
            differ += not np.allclose(first, second)
            variable.assign((first + second) / 2)
    assert differ == 4  # two layers of BatchNormalization
    expected = model.evaluate(task.eval_data(64), verbose=0, return_dict=True)
    assert row["metrics"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_kills_of_the_evaluator_and_of_a_worker(tmp_path):
    epochs = 15
    arguments = ["--config=digits_multi_worker", f"--config.epochs={epochs}", "--config.cluster.evaluator=1", *KEEP]
    killed = tmp_path / "killed"
    process = start(*arguments, "--config.max_restarts=1", gate.flag(killed, 10), f"--workdir={tmp_path}")
    try:
        until(lambda: len(rows(tmp_path)) >= 2, 110)
        evaluator = process_of("evaluator:0", process)
        os.kill(evaluator, signal.SIGKILL)
        until(lambda: process_of("evaluator:0", process) not in (None, evaluator))
        evaluator = process_of("evaluator:0", process)
        os.kill(process_of("worker:1", process), signal.SIGKILL)
        killed.touch()
    finally:
        output = finish(process)
    assert process.returncode == 0, output
    assert "evaluator:0 lost (killed by SIGKILL); restarting it while the training continues" in output
    assert "worker:1 lost" in output and "restart 1/1" in output
    check(tmp_path, epochs)
    assert (tmp_path / "logs" / "evaluator-0.log").read_text().count(
        "evaluating each new backup"
    ) == 2  # not at the cluster's restart


@pytest.mark.full
def test_an_evaluator_that_fails_ends_no_training(tmp_path):
    task = "--config.task=tests.helpers.failing_evaluation:FailsInEvaluator"
    process = start(
        "--config=digits", task, "--config.epochs=2", "--config.cluster.evaluator=1", f"--workdir={tmp_path}"
    )
    output = finish(process)
    assert process.returncode == 0, output
    assert "evaluator:0 failed with exit code 1: RuntimeError: no evaluation today; all 3 restarts are spent" in output
    assert (tmp_path / "model.keras").exists() and not rows(tmp_path)


@pytest.mark.full
def test_beside_parameter_servers(tmp_path):
    process = start("--config=digits_parameter_server", "--config.cluster.evaluator=1", *KEEP, f"--workdir={tmp_path}")
    output = finish(process)
    assert process.returncode == 0, output
    epochs = json.loads((tmp_path / "summary.json").read_text())["epochs"]
    check(tmp_path, epochs)


@pytest.mark.full
def test_on_another_host_by_tf_config(tmp_path):
    arguments = ["--config=digits", "--config.epochs=4", "--config.cluster.source=auto", *KEEP, f"--workdir={tmp_path}"]
    cluster = {"worker": ["localhost:1"], "evaluator": ["localhost:2"]}
    evaluator = start(*arguments, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}}))
    trained = start(*arguments, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
    outputs = [finish(process) for process in (trained, evaluator)]
    assert (trained.returncode, evaluator.returncode) == (0, 0), outputs
    check(tmp_path, 4)


@pytest.mark.parametrize(
    ("config", "tf_config", "arguments", "said"),
    [
        (
            "digits_multi_worker",
            "",
            ["--hosts=localhost:1,localhost:2", "--task=worker:0"],
            "but here hosts starts them; leave",
        ),
        ("synthetic", EVALUATOR, ["--config.cluster.evaluator=0"], "task 'synthetic' has no method eval_data"),
        ("digits", EVALUATOR, ["--config.backup.save_freq=never"], "is not possible with backup.save_freq=never"),
    ],
)
def test_what_no_evaluator_can_follow_is_said_in_one_sentence(
    tmp_path, monkeypatch, capsys, config, tf_config, arguments, said
):
    monkeypatch.setenv("TF_CONFIG", tf_config)
    flags = [f"--config={config}", "--config.cluster.evaluator=1", *arguments, f"--workdir={tmp_path}"]
    assert train.main(["train", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
