"""Where a run's wall time went: parts that add up to it, over restarts."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import psutil
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tests.monitoring.test_tensorboard import curves
from tests.multiprocess.models import line
from tfdist.monitoring import Goodput, TensorBoard
from tfdist.runtime.report import goodput, progress
from tools import chaos

ROOT = pathlib.Path(__file__).parents[2]


class Clock:
    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


def test_each_moment_belongs_to_one_part():
    clock = Clock()
    ledger = goodput.Ledger(990.0, clock)
    activities = (
        ("building", 0),
        ("training", 0),
        ("compiling", 3),
        ("training", 2),
        ("", 4),
        ("saving", 5),
        ("building", 1),
    )
    for activity, seconds in activities:
        ledger.follow(activity)
        clock.now += seconds
    found = ledger.now()
    assert found == dict.fromkeys(goodput.PARTS, 0.0) | {
        "startup": 10.0,
        "compilation": 3.0,
        "steps": 2.0,
        "other": 5.0,
        "saving": 5.0,
    }
    assert sum(found.values()) == clock.now - 990.0


@pytest.mark.parametrize(("saved", "gap"), [(4.0, True), (4.0, False), (0.0, True)])
def test_what_follows_a_killed_process_counts_on_from_its_record(tmp_path, saved, gap):
    clock = Clock(1001.0)
    first = goodput.Ledger(1000.0, clock)
    first.keep(tmp_path / "record")
    first.switch("steps")
    clock.now += 10
    first.switch("steps")
    clock.now += 7  # is killed, and what it did since is known to nobody
    second = goodput.Ledger(1030.0, clock)
    clock.now = 1032.0
    second.continue_from(goodput.read(tmp_path / "record"), saved, gap)
    found = second.now()
    assert found["steps"] == saved and found["repeated_steps"] == 10.0 - saved
    assert found["startup"] == 1.0 + 2.0
    assert found["restarts"] == (1030.0 - 1011.0 if gap else 0.0)


def test_a_torn_record_is_none(tmp_path):
    (tmp_path / "record").write_bytes(b"\0" * 7)
    assert goodput.read(tmp_path / "record") is None is goodput.read(tmp_path / "absent")


def test_a_training_that_is_not_resumed_does_not_count_what_another_left(tmp_path, monkeypatch):
    monkeypatch.delenv(progress.FOLDER, raising=False)
    before = goodput.Ledger(time.time() - 1000)
    before.keep(tmp_path / "record")
    found = Goodput(tmp_path / "record")
    found.on_epoch_begin(0)
    assert found.report()["wall_seconds"] == pytest.approx(time.time() - psutil.Process().create_time(), abs=100)
    resumed = Goodput(tmp_path / "record")
    resumed.load_state_dict({"steps": 0.0})
    resumed.on_epoch_begin(0)
    assert resumed.report()["seconds"]["startup"] > found.report()["seconds"]["startup"]
    goodput.set_ledger(None)


# A batch is prepared while the step before it ends, which on a busy machine takes longer than it does: by single steps, this may
# be that of each batch.
@pytest.mark.parametrize(("steps_per_execution", "seconds"), tiers.cases([(4, 0.03), (1, 0.3)], quick=1))
def test_what_steps_wait_for_their_data_is_told(tmp_path, mirrored, steps_per_execution, seconds):
    trainer = tfdist.Trainer(mirrored)
    with trainer.scope():
        model, x, y = line(keras)
        model.steps_per_execution = steps_per_execution

    def slow(*batch):
        time.sleep(seconds)
        return batch

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    data = data.map(lambda *batch: tf.numpy_function(slow, batch, [each.dtype for each in batch]))
    data = data.map(lambda x, y: (tf.ensure_shape(x, (10, 2)), tf.ensure_shape(y, (10, 1))))
    found = Goodput()
    board = TensorBoard(tmp_path, "batch")
    trainer.fit(model, data, epochs=2, verbose=0, callbacks=[found, board])
    goodput.set_ledger(None)
    told = found.report()
    # 2 epochs of 5 batches, of which one is prepared between two executions.
    assert 6 * seconds <= told["seconds"]["input_wait"] == pytest.approx(model.train_function.input_seconds, abs=0.01)
    waits = curves(tmp_path)["train"]["perf/input_wait_ms"]
    steps = [1] * 10 if steps_per_execution == 1 else [4, 1, 4, 1]
    total = sum(value * number for (_, value), number in zip(waits, steps, strict=True))
    assert total == pytest.approx(1000 * model.train_function.input_seconds, rel=1e-3)
    assert max(value for _, value in waits) >= 1000 * seconds / 2


def train(tmp_path, code, kills=True, **how):
    """Runs a training of two workers, or of `cluster.workers`; kills a worker in it once it has backups; returns the summary."""
    how = {"epochs": 6, "backup.save_freq": 10, "backup.keep": 1, **how}
    flags = [f"--config.{name}={value}" for name, value in how.items()]
    command = [sys.executable, "-m", "tfdist.train", "--config=configs/digits_multi_worker.py", *flags]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            [*command, f"--workdir={tmp_path}/run"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        record = tmp_path / "run/goodput.bin"
        ends = time.monotonic() + 120
        backups = tmp_path / "run/backup"
        while kills and (
            (found := goodput.read(record)) is None
            or found.seconds["steps"] < 0.2
            or len([*backups.glob("*/manifest.json")]) < 1
        ):
            assert time.monotonic() < ends and process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.02)
        if kills:
            os.kill(next(pid for _, pid, _ in chaos.tasks(process.pid)), signal.SIGKILL)
        assert process.wait(150) == code, (tmp_path / "output").read_text()
    finally:
        process.kill()
    summary_file = tmp_path / "run/summary.json"
    return json.loads(summary_file.read_text()) if code == 0 else {}


@pytest.mark.full
def test_a_run_that_continues_with_another_number_of_workers_counts_on(tmp_path):
    train(tmp_path, 128 + signal.SIGKILL, **{"strategy.replicas": 2})
    before = goodput.read(tmp_path / "run/goodput.bin").seconds
    summary = train(tmp_path, 0, kills=False, **{"strategy.replicas": 2, "cluster.workers": 1})
    told, (_, second) = summary["goodput"], summary["sizes"]
    assert summary["sizes"] == [{"step": 0, "workers": 2}, {"step": second["step"], "workers": 1}]
    assert 0 < second["step"] < summary["steps"] and second["step"] % 10 == 0
    assert f"\nworkers over time: 2 from step 0, 1 from step {second['step']}\n" in (tmp_path / "output").read_text()
    assert sum(told["seconds"].values()) == pytest.approx(told["wall_seconds"], abs=0.1)
    assert told["productive"] == pytest.approx(told["seconds"]["steps"] / told["wall_seconds"], abs=0.01)
    assert told["seconds"]["restarts"] == summary["restarts"] == 0  # the user has run the command again
    steps = told["seconds"]["steps"] + told["seconds"]["repeated_steps"]
    assert steps > before["steps"] > told["seconds"]["repeated_steps"]
    assert all(told["seconds"][part] >= before[part] - 0.01 for part in ("startup", "compilation", "saving"))
    written = curves(tmp_path / "run/tensorboard")["train"]["cluster/workers"]
    assert [number for _, number in written] == [2.0 if step <= second["step"] else 1.0 for step, _ in written]


@pytest.mark.full
def test_the_parts_of_a_run_that_was_killed_add_up_to_its_wall_time(tmp_path):
    begun = time.time()
    summary = train(tmp_path, 0, max_restarts=1)
    summary_file = tmp_path / "run/summary.json"
    took = (
        summary_file.stat().st_mtime - begun
    )  # a busy machine may take a while from the last reading of the clock to the file
    assert summary["restarts"] == 1
    told = summary["goodput"]
    assert sum(told["seconds"].values()) == pytest.approx(told["wall_seconds"], abs=0.1)
    assert took - 5 < told["wall_seconds"] < took + 1.5  # the system tells when a process began to the second
    # A restart may take less than the hundredth of a second to which parts are rounded.
    assert min(told["seconds"].values()) >= 0 and told["seconds"]["steps"] > 0
