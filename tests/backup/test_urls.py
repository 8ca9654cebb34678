"""Backups at a URL: complete or absent whatever the server and the local disk do, and nothing is left on the local disk."""

from __future__ import annotations

import os
import tempfile
import uuid

import pytest

from tests.backup.test_storage import ALONE, FOURTEEN, ONE, SEVEN, write
from tests.helpers import full_disk
from tests.helpers.s3 import s3  # noqa: F401 (a fixture)
from tfdist.backup import listing, search
from tfdist.backup import storage as storage_lib
from tfdist.backup.search import find_backup
from tfdist.backup.storage import Storage
from tfdist.errors import BackupError
from tfdist.runtime.folders import storage as urls
from tfdist.runtime.folders.finished_training import remove_backups


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, which is empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(urls, "PAUSES", (0.01, 0.01))
    monkeypatch.setattr(search, "PATIENCE", 0.1)
    yield folder
    assert os.listdir(folder) == []


@pytest.fixture(params=["disk", "memory", "s3"])
def place(request):
    """A folder of backups in each kind of storage."""
    if request.param == "disk":
        return str(request.getfixturevalue("tmp_path") / "run")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"{request.getfixturevalue('s3').url}/run"


def find(url):
    return find_backup(Storage(url, 0, 1), ALONE, ONE)


def test_they_are_read_listed_moved_aside_and_removed(place):
    assert find(place) is None
    for step in (3, 7, 14):
        write(place, step)
    assert find(place).point == FOURTEEN
    assert [(each.point.step, each.state) for each in listing.read(place)] == [(14, "whole"), (7, "whole")]
    urls.write(f"{place}/step-14/shared.data-00000-of-00001", b"torn")
    assert find(place).point == SEVEN
    storage = Storage(place, 0, 1)
    storage_lib.set_damaged_aside(storage, SEVEN)
    assert {*urls.list_folder(place)} == {"checkpoint", "step-7", "damaged-step-14"}
    write(place, 21, keep=1)
    storage_lib.remove_damaged(place)
    assert {*urls.list_folder(place)} == {"checkpoint", "step-21"}
    remove_backups(place)
    assert not urls.exists(place)


def test_a_server_that_fails_for_a_while_costs_nothing(s3, capsys):  # noqa: F811
    failed = []

    def fail(method, path, body):
        if method == "PUT" and "step-7/rank-0.index" in path and not capsys.readouterr().out:
            failed.append(path)
            return 500
        return None

    s3.rule = fail
    write(f"{s3.url}/run", 7)
    assert failed and find(f"{s3.url}/run").point == SEVEN


def test_a_server_that_fails_for_good_is_named_and_the_backup_before_stays(s3):  # noqa: F811
    url = f"{s3.url}/run"
    write(url, 7)
    s3.rule = lambda method, path, body: 500 if method == "PUT" else None
    with pytest.raises(BackupError, match=rf"^{url}/step-14/rank-0.* cannot be written: InternalError of the test"):
        write(url, 14)
    s3.rule = None
    assert find(url).point == SEVEN
    s3.rule = lambda method, path, body: 500 if method == "GET" else None
    with pytest.raises(BackupError, match=r"cannot be .*The backup may be whole, so the training neither starts again"):
        find(url)


def test_a_full_local_disk_is_named(temporary, s3):  # noqa: F811
    url = f"{s3.url}/run"
    write(url, 7)
    with full_disk.mounted(temporary, 4096):
        (temporary / "full").write_bytes(b"x" * 4096)
        with pytest.raises(BackupError, match=r"temporary f.*No space left on device.*TMPDIR"):
            write(url, 14)
        with pytest.raises(BackupError, match=r"temporary f.*No space left on device.*TMPDIR"):
            find(url)
        (temporary / "full").unlink()
    assert find(url).point == SEVEN
