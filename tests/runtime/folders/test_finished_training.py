"""The backups of a training whose model is saved: a launcher removes those of its own run, and no others."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess

import psutil
import pytest

from tests.helpers import full_disk
from tfdist.runtime.folders import claim, finished_training
from tfdist.runtime.report import progress


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A function that makes a folder with a backup of a finished training of a run."""

    def make(name: str, run: str) -> str:
        folder = tmp_path / name
        (folder / "step-7").mkdir(parents=True)
        for file in ("checkpoint", "step-7/manifest.json", "step-7/shared.index"):
            (folder / file).write_text("")
        with monkeypatch.context() as task:
            task.setenv(claim.JOB, run)
            assert not finished_training.finish(str(folder))
        return str(folder)

    return make


def test_a_launcher_removes_the_backups_of_its_own_run_only(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "ENDING_SECONDS", 0.3)
    folders = [finished("own", claim.this_run()), finished("own/fit-2", claim.this_run())]
    others = [finished("another", "process 1 on another (1), begun at 1.0"), finished("used", claim.this_run())]
    with subprocess.Popen(["sleep", "600"]) as process:
        begun = psutil.Process(process.pid).create_time()
        owner = f"process {process.pid} on {socket.gethostname()} (0f), begun at {begun:.2f}"
        (tmp_path / "used" / claim.FILE).write_text(owner)
        finished_training.remove_of_this_run([*folders, *others, str(tmp_path / "gone")], print)
        process.kill()
    assert sorted(os.listdir(tmp_path)) == ["another", "used"]
    assert all(os.path.exists(f"{folder}/step-7/manifest.json") for folder in others)


def test_backups_that_a_launcher_cannot_remove_cost_a_message(finished, monkeypatch):
    folder, said = finished("own", claim.this_run()), []

    def fails(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(finished_training, "remove_backups", fails)
    finished_training.remove_of_this_run([folder], said.append)
    assert len(said) == 1 and "cannot be removed, though the model is saved: Permission denied" in said[0]


def test_a_removal_that_was_killed_is_completed_by_the_next_run(finished, monkeypatch):
    folder = finished("own", "process 1 on elsewhere (ab), begun at 1.0")

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as dies, pytest.raises(KeyboardInterrupt):
        dies.setattr(finished_training.storage, "remove_tree", killed)
        finished_training.remove_backups(folder)
    assert finished_training.is_of_another_run(folder)
    finished_training.remove_backups(folder)
    assert not os.path.exists(folder)


def test_backups_whose_note_a_full_disk_keeps_from_the_launcher_are_removed(tmp_path, monkeypatch):
    notes, folder = tmp_path / "progress", tmp_path / "backup"
    notes.mkdir()
    (folder / "step-7").mkdir(parents=True)
    monkeypatch.setenv(progress.FOLDER, str(notes))
    monkeypatch.setenv(claim.JOB, claim.this_run())
    with full_disk.mounted(notes, 8192):
        with contextlib.suppress(OSError), (notes / "ballast").open("wb", buffering=0) as ballast:
            ballast.write(bytes(1 << 14))
        progress.note_backup(str(folder))
        assert not progress.folders_with_backups(str(notes))
        assert finished_training.finish(str(folder)) and not folder.exists()
        # With room again at the end, a restart finds the backups.
        (folder / "step-7").mkdir(parents=True)
        (notes / "ballast").unlink()
        assert not finished_training.finish(str(folder))
        finished_training.remove_of_this_run(progress.folders_with_backups(str(notes)), print)
        assert not folder.exists()
