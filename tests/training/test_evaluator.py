"""`Evaluator` in this process: which backups it evaluates, and that it does so once."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfdist
from tests.helpers.reused_model import ReusedModel
from tests.helpers.s3 import s3  # noqa: F401 (a fixture)
from tfdist.runtime.folders import storage
from tfdist.runtime.folders.workdir import Workdir
from tfdist.training.evaluator import Evaluator

EPOCHS, STEPS = 4, 5
rng = np.random.default_rng(0)
X = rng.standard_normal((40, 6), np.float32)
Y = (X[:, :1] - 2 * X[:, 1:2]).astype(np.float32)


def build(trainer):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    with trainer.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", metrics=["mae"])
    return model


def finish(workdir, training):
    """Writes what a training leaves that has finished."""
    (workdir / "config.json").write_text("{}")
    (workdir / "summary.json").write_text(json.dumps({"steps": EPOCHS * STEPS, "epochs": EPOCHS, "training": training}))


def train(workdir):
    """Trains, and keeps all backups; returns the predictions of each epoch's model, by step, from plain Keras."""
    backup = tfdist.BackupAndRestore(workdir / "backup", keep=100, delete_checkpoint=False)
    trainer = tfdist.Trainer("one_device", cluster=False, backup=backup)
    model = build(trainer)
    predictions = {}
    note = lambda epoch, logs: predictions.update({(epoch + 1) * STEPS: model(X, training=False).numpy()})  # noqa: E731
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    trainer.fit(model, data, epochs=EPOCHS, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=note)])
    trainer.save(model, workdir / "model.keras")
    finish(workdir, backup.training_id)
    return predictions


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A work directory of a training, and the predictions of each epoch's model."""
    workdir = tmp_path_factory.mktemp("trained")
    return workdir, train(workdir)


@pytest.fixture
def predictions(trained, tmp_path):
    """The predictions of each epoch's model, whose backups are in `tmp_path`."""
    workdir, found = trained
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    return found


@functools.cache
def reused():
    return ReusedModel(build(tfdist.Trainer("one_device", cluster=False)))


def evaluate(workdir, data=None, backup_dir=None):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16) if data is None else data
    backup_dir = backup_dir or str(workdir / "backup")
    Evaluator(reused().reset(), data, backup_dir, Workdir(workdir), "evaluator-0", final_differs=False).run()
    lines = (workdir / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def check(rows, predictions):
    for row in rows:
        error = predictions[row["step"]] - Y
        assert row["metrics"]["loss"] == pytest.approx(np.mean(error**2), rel=1e-5)
        assert row["metrics"]["mae"] == pytest.approx(np.mean(np.abs(error)), rel=1e-5)


def curve(workdir):
    events = EventAccumulator(str(workdir / "tensorboard" / "evaluator-0"), {"tensors": 0}).Reload()
    found = events.Tensors("evaluation_loss_vs_iterations")
    assert len(found) == len({event.step for event in found})
    return {event.step: float(tf.make_ndarray(event.tensor_proto)) for event in found}


def test_each_backup_is_evaluated_once_in_order(tmp_path, predictions):
    rows = evaluate(tmp_path)
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert [row["backup"] for row in rows] == [f"step-{step}-end" for step in (5, 10, 15, 20)]
    check(rows, predictions)
    # As a kill in the fourth evaluation leaves it; meanwhile the training has removed the backups.
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "evaluations.jsonl").write_text("".join(lines[:3]) + lines[3][:10])
    shutil.rmtree(tmp_path / "backup")
    again = evaluate(tmp_path)
    assert again[:3] == rows[:3] and [row["step"] for row in again] == [5, 10, 15, 20]
    assert again[3]["backup"] == "model.keras" and again[3]["epoch"] == EPOCHS
    check(again, predictions)
    assert curve(tmp_path) == pytest.approx({row["step"]: row["metrics"]["loss"] for row in again})
    assert evaluate(tmp_path) == again


def test_damaged_backups_are_left_out_with_one_warning_each(tmp_path, predictions, caplog):
    backup = tmp_path / "backup"
    (backup / "step-10-end" / "manifest.json").unlink()  # killed while it was written
    (path,) = (backup / "step-15-end").glob("shared.data*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with caplog.at_level("WARNING", "tfdist"):
        rows = evaluate(tmp_path)
    assert [row["step"] for row in rows] == [5, 20]
    check(rows, predictions)
    warnings = sorted(record.getMessage() for record in caplog.records if "skips this backup" in record.getMessage())
    assert len(warnings) == 2 and "step-10-end was not finished" in warnings[0] and "step-15-end" in warnings[1]


@pytest.mark.full
@pytest.mark.parametrize("left", ["nothing", "the manifest"])
def test_backups_that_go_while_it_works_are_not_missed(tmp_path, predictions, caplog, left):

    def remove():
        for folder in (tmp_path / "backup").glob("step-1*"):
            for path in folder.iterdir():
                if left == "nothing" or path.name != "manifest.json":
                    path.unlink()
            if left == "nothing":
                folder.rmdir()
        return np.float32(0)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    data = data.map(lambda x, y: (x + tf.ensure_shape(tf.numpy_function(remove, [], tf.float32), ()), y))
    rows = evaluate(tmp_path, data)
    assert [row["step"] for row in rows] == [5, 20]
    check(rows, predictions)
    assert sum("skips this backup" in r.getMessage() for r in caplog.records) == (2 if left == "the manifest" else 0)


@pytest.mark.full
def test_a_damaged_backup_that_goes_keeps_it_from_no_end(tmp_path, predictions, caplog):
    (tmp_path / "backup" / "step-10-end" / "manifest.json").unlink()

    def remove():
        if (
            len(
                (tmp_path / "evaluations.jsonl").read_text().splitlines()
                if (tmp_path / "evaluations.jsonl").exists()
                else []
            )
            == 2
        ):
            shutil.rmtree(tmp_path / "backup" / "step-10-end", ignore_errors=True)
        return np.float32(0)

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    data = data.map(lambda x, y: (x + tf.ensure_shape(tf.numpy_function(remove, [], tf.float32), ()), y))
    assert [row["step"] for row in evaluate(tmp_path, data)] == [5, 15, 20]
    assert "skips this backup" not in caplog.text


@pytest.mark.full
def test_another_training_in_the_folder_is_evaluated_anew(tmp_path):
    train(tmp_path)
    first = evaluate(tmp_path)
    shutil.rmtree(tmp_path / "backup")
    predictions = train(tmp_path)
    rows = evaluate(tmp_path)
    assert [row["step"] for row in rows] == [row["step"] for row in first] == [5, 10, 15, 20]
    assert {row["training"] for row in rows}.isdisjoint({row["training"] for row in first})
    check(rows, predictions)
    before = (tmp_path / "evaluations.before.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in before] == first
    assert curve(tmp_path) == pytest.approx({row["step"]: row["metrics"]["loss"] for row in rows})


def test_a_storage_that_fails_for_a_while_is_waited_for(tmp_path, predictions, caplog, s3):  # noqa: F811
    for path in filter(pathlib.Path.is_file, (tmp_path / "backup").rglob("*")):
        storage.upload(str(path), f"{s3.url}/{path.relative_to(tmp_path)}")
    failures = iter([500] * 5)
    s3.rule = lambda method, path, body: next(failures, None) if "list-type" in path else None
    check(rows := evaluate(tmp_path, backup_dir=f"{s3.url}/backup"), predictions)
    assert [row["step"] for row in rows] == [*predictions]
    assert caplog.text.count("the evaluator tries again until it can be") == 1
