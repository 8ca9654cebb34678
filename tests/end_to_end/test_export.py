"""`--config.export.best=val_loss` and `--config.export.final=true`: what is exported is the best epoch's model, and the last one's."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.end_to_end.test_evaluator import process_of
from tests.end_to_end.test_train import finish, start
from tests.helpers import gate, tiers
from tests.helpers.launched_job import until
from tests.monitoring.test_tensorboard import curves
from tfdist.tasks import digits

STEPS = 22  # of an epoch of the digits
# From the fourth epoch on, the learning rate is a thousand times what it was.
ROSE = ["--config.schedule.name=step", f"--config.schedule.boundaries={3 * STEPS}", "--config.schedule.factor=1000"]


def loss(path):
    """The validation loss of an exported model, in plain arithmetic but for the model."""
    images, labels = digits.load()[1]
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    logits = next(iter(served(tf.constant(images)).values())).numpy().astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels])


def check(workdir, output):
    """The only best model is the one of the epoch with the least loss, which was not the last; the final one is the last one's."""
    losses = [value for _, value in curves(workdir / "tensorboard")["validation"]["epoch_loss"]]
    least = int(np.argmin(losses))
    assert losses[-1] > 1.05 * losses[least]
    (best,), (final,) = ((workdir / "export" / name).iterdir() for name in ("best", "final"))
    assert json.loads((best / "assets.extra" / "tfdist.json").read_text())["epoch"] == least + 1
    assert f"exported the model of epoch {least + 1} (val_loss {losses[least]:.6g}) to {best}" in output
    assert [loss(best), loss(final)] == pytest.approx([losses[least], losses[-1]], rel=1e-4)


@pytest.mark.parametrize(
    "config", tiers.cases(["digits", "digits_mirrored", "digits_multi_worker", "digits_parameter_server"], quick=1)
)
def test_the_best_and_the_last_model_are_exported(config, tmp_path):
    arguments = [f"--config={config}", "--config.epochs=5", *ROSE, f"--workdir={tmp_path}"]
    is_one_process = config in ("digits", "digits_mirrored")
    process = start(*arguments, "--config.export.best=val_loss", "--config.export.final=true", forked=is_one_process)
    output = finish(process)
    assert process.returncode == 0, output
    check(tmp_path, output)


@pytest.mark.full
def test_a_restart_after_a_kill_keeps_the_best(tmp_path):
    killed = tmp_path / "killed"
    arguments = [
        "--config=digits_multi_worker",
        "--config.epochs=8",
        *ROSE,
        f"--workdir={tmp_path}",
        gate.flag(killed, 6),
    ]
    process = start(
        *arguments, "--config.export.best=val_loss", "--config.export.final=true", "--config.max_restarts=1"
    )
    try:
        until(lambda: (tmp_path / "export" / "best" / "3").exists(), 110)
        os.kill(process_of("worker:0", process), signal.SIGKILL)
        killed.touch()
    finally:
        output = finish(process)
    assert process.returncode == 0 and "restart 1/1" in output, output
    check(tmp_path, output)


@pytest.mark.full
def test_an_unknown_metric_ends_the_first_epoch_with_one_sentence(tmp_path):
    process = start("--config=digits", "--config.export.best=val_acc", f"--workdir={tmp_path}")
    output = finish(process)
    assert process.returncode == 2, output
    said = "unknown metric of ExportBest 'val_acc'; did you mean 'val_accuracy'? Known: accuracy, loss, val_accuracy, val_loss."
    assert output.splitlines()[-1].endswith(said)
