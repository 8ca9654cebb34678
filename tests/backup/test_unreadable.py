"""A backup that cannot be read may be whole: it is tried again, then refused by its name, and nothing is removed."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from tests.backup.test_storage import ALONE, FILES, ONE, files, write
from tests.helpers.unprivileged import open_folder, unprivileged
from tfdist.backup import search
from tfdist.backup.search import find_backup, read_seed
from tfdist.backup.storage import Storage
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime.folders.finished_training import remove_backups
from tfdist.runtime.report import progress


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.setattr(search, "PATIENCE", 0.3)
    monkeypatch.setattr(search, "RETRY_EVERY", 0.05)
    with open_folder() as made, unprivileged():
        yield made


def find(folder):
    return find_backup(Storage(str(folder), 0, 1), ALONE, ONE)


@pytest.mark.parametrize("name", ["", *FILES])
def test_it_is_refused_and_left(folder, capsys, name):
    write(folder, 7)
    write(folder, 14)
    before, path = files(folder), folder / "step-14" / name
    path.chmod(0)
    with pytest.raises(
        BackupError, match=r"step-14.* cannot be read: .*ermission denied.*neither starts again nor continues"
    ):
        find(folder)
    assert "trying again for" in capsys.readouterr().out
    assert read_seed(str(folder)) == (3 if "data" in name else None), "no older one's"
    Storage(str(folder), 0, 1).clean()
    path.chmod(0o755)
    assert files(folder) == before
    assert find(folder).point.step == 14


def test_an_older_one_is_not_removed_either(folder):
    write(folder, 7)
    write(folder, 14, keep=9)
    (folder / "step-7").chmod(0)
    write(folder, 21, keep=1)
    (folder / "step-7").chmod(0o755)
    assert (folder / "step-7" / "manifest.json").exists() and not (folder / "step-14").exists()


def test_one_that_cannot_be_read_for_a_moment_is_used(folder, monkeypatch, capsys):
    monkeypatch.setattr(search, "PATIENCE", 60.0)
    write(folder, 7)
    write(folder, 14)
    path = folder / "step-14" / "shared.data-00000-of-00001"
    path.chmod(0)

    def free(record):
        path.chmod(0o644)
        return True

    # As soon as it is said that it is tried again.
    monkeypatch.setattr(search.logger, "filters", [free, *search.logger.filters])
    assert find(folder).point.step == 14
    assert capsys.readouterr().out.count("trying again") == 1


def test_a_folder_that_cannot_be_listed_does_not_look_empty(folder):
    inner = folder / "backup"
    write(inner, 7)
    inner.chmod(0o300)
    with pytest.raises(BackupError, match="backup cannot be read: Permission denied"):
        find(inner)
    inner.chmod(0o755)


def test_a_mount_that_is_gone_is_no_new_training(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    monkeypatch.setenv(progress.FOLDER, str(tmp_path / "progress"))
    storage, mount = pathlib.Path(tmp_path / "storage"), tmp_path / "mount"
    for path in (tmp_path / "progress", storage, mount):
        path.mkdir()
    write(storage / "backup", 7)
    if subprocess.run(["mount", "--bind", storage, mount], capture_output=True).returncode:
        pytest.skip("mounts are not allowed here")
    try:
        assert find(mount / "backup").point.step == 7
        progress.note_backup(str(mount / "backup"))
    finally:
        subprocess.run(["umount", mount], check=True)
    progress.clear(tmp_path / "progress", 1)
    assert not progress.read_all(tmp_path / "progress")
    had_backup = progress.had_backup(str(mount / "backup"))
    with pytest.raises(BackupError, match="holds no backup, though this run saved one there before it was restarted"):
        find_backup(Storage(str(mount / "backup"), 0, 1), ALONE, ONE, had_backup)
    assert not progress.had_backup(str(mount / "fit-2"))
    progress.note_backup(str(mount / "backup"), exists=False)
    assert not progress.had_backup(str(mount / "backup"))


def test_of_a_folder_that_is_a_volume_the_backups_are_removed_and_it_stays(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("no right to mount a volume")
    try:
        write(tmp_path, 7)
        remove_backups(str(tmp_path))
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("name", ["step-7", "step-7/shared.index", "checkpoint"])
def test_another_users_is_refused(tmp_path, name):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    write(tmp_path, 7)
    os.chown(tmp_path / name, 12345, 0)
    with pytest.raises(ConfigError, match=rf"{name} belongs to user 12345.*chown -R 0 "):
        find(tmp_path)
