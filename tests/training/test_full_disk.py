"""On a full disk the training goes on with one warning, and what could not be saved is told: real disks of a few bytes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest

import tfdist
from tests.helpers import full_disk
from tfdist.monitoring.tensorboard import TensorBoard
from tfdist.runtime.files import WriteError
from tfdist.runtime.folders.workdir import Workdir
from tfdist.runtime.report import goodput
from tfdist.training import callback_kinds

ROOT = pathlib.Path(__file__).parents[2]
X = np.ones((32, 4), np.float32)


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


def build(trainer, units):
    keras.backend.clear_session()
    with trainer.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def small(trainer):
    return build(trainer, 4)


@pytest.fixture(scope="module")
def large(trainer):
    """A model that the disks do not hold."""
    return build(trainer, 20_000)


def fit(trainer, model, *callbacks, **arguments):
    return trainer.fit(model, X, X[:, :1], batch_size=8, verbose=0, callbacks=[*callbacks], **arguments)


def fill(folder):
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def warnings(capsys, path):
    return [line for line in capsys.readouterr().out.splitlines() if f"cannot write {path}" in line]


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "exported"])
def test_what_cannot_be_saved_is_told_and_the_file_before_stays(trainer, large, tmp_path, name):
    """HDF5 would crash the process at its end, had it met the full disk."""
    path = tmp_path / name
    save = {".keras": trainer.save, ".h5": lambda model, path: model.save_weights(path)}.get(
        path.suffix, trainer.export
    )
    with full_disk.mounted(tmp_path, 1 << 18):
        path.write_text("before")
        with pytest.raises(WriteError) as raised:
            save(large, path)
        told = str(raised.value)
        assert told.startswith(f"cannot write {path}: No space left on device. The old file is unchanged. Free")
        assert path.read_text() == "before" and os.listdir(tmp_path) == [name]


def test_a_summary_that_cannot_be_written_is_told_and_the_one_before_stays(tmp_path):
    with full_disk.mounted(tmp_path, 1 << 14):
        path, workdir = tmp_path / "summary.json", Workdir(tmp_path)
        workdir.write_json("summary.json", {"steps": 1})
        fill(tmp_path)
        with pytest.raises(
            WriteError, match=r"cannot write .*/summary.json: No space left on device\. .*Free the disk"
        ):
            workdir.write_json("summary.json", {"steps": 2, "long": "x" * 5000})
        assert '"steps": 1' in path.read_text() and sorted(os.listdir(tmp_path)) == ["filler", "summary.json"]


@pytest.mark.full
def test_the_command_names_the_path_of_a_model_that_it_cannot_write(tmp_path):
    command = [sys.executable, "-m", "tfdist.train", "--config=configs/digits.py", f"--workdir={tmp_path}/run"]
    options = {"epochs": 1, "task_options.filters": 16, "backup.save_freq": "never"}
    command += [f"--config.{name}={value}" for name, value in options.items()]
    with full_disk.mounted(tmp_path, 40 << 10):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
        assert not list(tmp_path.rglob("*.partial*")) and not list(tmp_path.rglob("model*"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"tfdist: cannot write {tmp_path}/run/model.keras: No space left on device. " in done.stderr


def test_a_csv_log_on_a_full_disk_costs_one_warning(trainer, small, tmp_path, capsys):
    path = tmp_path / "log.csv"
    with full_disk.mounted(tmp_path, 1 << 14):
        path.touch()
        fill(tmp_path)
        history = fit(trainer, small, keras.callbacks.CSVLogger(path), epochs=2)
        assert len(history.epoch) == 2
    (line,) = warnings(capsys, path)
    assert "No space left on device; the training goes on" in line


@pytest.mark.full
def test_a_csv_log_is_cut_whole_or_not_at_all(trainer, tmp_path, capsys):
    """A training that continues from a backup, on a disk that is full by then."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    disk, rows = tmp_path / "disk", []
    disk.mkdir()
    with full_disk.mounted(disk, 1 << 14):
        path = disk / "log.csv"
        for last in (Stop(), keras.callbacks.Callback()):
            backup = tfdist.BackupAndRestore(tmp_path / "backup", save_freq=5)
            one = tfdist.Trainer(trainer.strategy, backup=backup)
            try:
                log = keras.callbacks.CSVLogger(path)
                fit(one, build(one, 4), log, last, epochs=4)
            except KeyboardInterrupt:
                log.csv_file.close()
                rows = path.read_text().splitlines()
                fill(disk)
        assert len(rows) == 4 and path.read_text().splitlines()[:4] == rows
    (line,) = [line for line in warnings(capsys, path) if "two rows for each repeated epoch" in line]
    assert "No space left on device" in line


@pytest.mark.parametrize("weights_only", [False, True])
def test_another_workers_model_that_nobody_reads_costs_one_warning(
    trainer, large, tmp_path, capsys, monkeypatch, weights_only
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TFDIST_PROGRESS", raising=False)
    name = "model.weights.h5" if weights_only else "model.keras"
    callback = keras.callbacks.ModelCheckpoint(name, save_weights_only=weights_only)
    with full_disk.mounted(tmp_path, 1 << 18):
        with callback_kinds.redirect_to_temporary_files([callback]):
            assert len(fit(trainer, large, callback, epochs=2).epoch) == 2
        assert not list(tmp_path.glob("tfdist-*"))
    out = capsys.readouterr().out
    assert out.count(f"cannot write temporary files in {tmp_path}/tfdist-") == 1
    assert callback.filepath == name


def test_tensorboards_curves_on_a_full_disk_cost_one_warning(trainer, small, tmp_path, capsys):
    with full_disk.mounted(tmp_path, 1 << 13):
        fill(tmp_path)
        history = fit(trainer, small, TensorBoard(tmp_path / "curves", 1), epochs=2)
    assert len(history.epoch) == 2
    assert capsys.readouterr().out.count("TensorBoard: nothing more is written to ") == 1


def test_a_goodput_file_on_a_full_disk_costs_one_warning(tmp_path, capsys):
    with full_disk.mounted(tmp_path, 1 << 13):
        fill(tmp_path)
        ledger = goodput.Ledger()
        ledger.keep(tmp_path / "goodput.bin")
        for part in ("steps", "saving", "steps"):
            ledger.switch(part)
        ledger.close()
    (line,) = warnings(capsys, tmp_path / "goodput.bin")
    assert "No space left on device; the training continues" in line


def test_a_backup_on_a_full_disk_ends_the_training_with_its_path(trainer, large, tmp_path):
    with full_disk.mounted(tmp_path, 1 << 18):
        one = tfdist.Trainer(trainer.strategy, backup=tfdist.BackupAndRestore(tmp_path / "backup"))
        with pytest.raises(
            tfdist.BackupError, match=rf"The backup {tmp_path}/backup/step-4/?.* could not be written: .*No space left"
        ):
            fit(one, large, epochs=3)
