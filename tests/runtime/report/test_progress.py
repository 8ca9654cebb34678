"""The records by which tasks and their supervisor tell each other how far they are."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tfdist.runtime.report import progress
from tfdist.runtime.report.progress import Progress


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(progress.FOLDER, str(tmp_path))
    return tmp_path


def test_without_a_supervisor_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(progress.FOLDER, raising=False)
    monkeypatch.chdir(tmp_path)
    progress.write(done=5, saved=3)
    assert progress.restarts() == 0 and not [*tmp_path.iterdir()]


def test_tasks_tell_how_far_they_are(folder, monkeypatch):
    monkeypatch.setenv(progress.TASK, "worker-1")
    assert progress.read(folder, "worker-1") == Progress() and not progress.read_all(folder)
    progress.write()
    assert progress.read_all(folder) == [Progress()], "a task that has created a strategy"
    progress.write(done=5)
    progress.write(saved=3, lost=progress.Loss("worker:0", "has ended"))
    expected = Progress(begun=True, done=5, saved=3, lost=progress.Loss("worker:0", "has ended"))
    assert progress.read(folder, "worker-1") == expected
    progress.write({"loss": np.float32(0.123456), "accuracy": 1.0, "curve": [1.0]})
    progress.write({"val_loss": 2e-10, "loss": 0.5}, done=6)
    assert progress.read(folder, "worker-1").metrics == {"loss": "0.5", "accuracy": "1", "val_loss": "2e-10"}
    progress.write({f"metric {number}": number for number in range(99)})
    metrics = progress.read(folder, "worker-1").metrics
    assert 15 < len(metrics) < 99 and metrics["metric 9"] == "9"
    progress.write(done=0)  # another training
    assert progress.read(folder, "worker-1").metrics == {}
    progress.clear(folder, 2)
    assert progress.read(folder, "worker-1") == Progress() and progress.restarts() == 2


def test_a_long_record_gives_way_to_a_short_one(folder):
    progress.write(lost=progress.Loss("worker:1", "x" * 9999))
    assert len(progress.read(folder, "worker-0").lost.cause) == 9999
    progress.write(lost=None, done=1)
    assert progress.read(folder, "worker-0") == Progress(begun=True, done=1)


@pytest.mark.parametrize("content", [b"", b'{"done": 1', b"\xff", b"[]", b"1"])
def test_what_is_half_written_is_not_read(tmp_path, content):
    (tmp_path / "worker-0.json").write_bytes(content)
    assert progress.read(tmp_path, "worker-0") == Progress()


@pytest.mark.parametrize(("end", "trains"), [("os._exit(0)", True), ("sys.exit()", False)])
def test_only_a_process_that_ends_without_pythons_shutdown_still_trains(folder, end, trains):
    code = f"""
import os, sys
from tfdist.runtime.report import progress
training = progress.training()
training.__enter__()
{end}
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=True, timeout=60)
    assert progress.read(folder, "worker-0").trains == trains


def test_another_process_of_a_task_keeps_what_the_first_has_reported(folder):
    progress.write(done=7, saved=3)
    code = "from tfdist.runtime.report import progress; progress.write(refused=True)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert progress.read(folder, "worker-0") == Progress(begun=True, done=7, saved=3, refused=True)
