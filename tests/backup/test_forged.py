"""Odd and forged backups: one sentence each, the older one is used, and nothing outside of the folder is read or written."""

from __future__ import annotations

import json
import os
import re
import shutil

import keras
import numpy as np
import pytest

from tests.backup.test_storage import ALONE, FOURTEEN, ONE, REST, SEVEN, write
from tests.helpers.unprivileged import NOBODY
from tfdist.backup import contents, listing, state
from tfdist.backup import storage as storage_lib
from tfdist.backup.contents import SHARED
from tfdist.backup.search import find_backup, read_seed
from tfdist.backup.storage import Storage
from tfdist.errors import ConfigError
from tfdist.runtime.folders import claim
from tfdist.runtime.folders.claim import Claim


def change_manifest(folder, change):
    path = folder / "step-14" / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("crc32")
    change(body)
    path.write_text(json.dumps({**body, "crc32": contents.checksum(body)}))


def change_part(folder, part, **tensors):
    """Writes a part anew, and the manifest that fits it."""
    storage = Storage(str(folder), 0, 1)
    manifest = storage.read_manifest(FOURTEEN)
    storage.write_part(
        FOURTEEN,
        part,
        {name: v for name, v in {**storage.read_part(FOURTEEN, part), **tensors}.items() if v is not None},
    )
    storage.write_manifest(FOURTEEN, {name: value for name, value in manifest.items() if name != "files"}, 9)


def without(name):
    return lambda folder: change_manifest(folder, lambda body: body.pop(name))


def changed(name, **values):
    return lambda folder: change_manifest(folder, lambda body: body[name].update(values))


def updated(**values):
    return lambda folder: change_manifest(folder, lambda body: body.update(values))


def in_place(name, make):
    def prepare(folder):
        path = folder / "step-14" / name
        path.unlink()
        make(path)

    return prepare


def linked(folder):
    shutil.move(folder / "step-14", folder / "elsewhere")
    (folder / "step-14").symlink_to(folder / "elsewhere")


def data_linked(folder):
    name = "shared.data-00000-of-00001"
    shutil.move(folder / "step-14" / name, folder / name)
    (folder / "step-14" / name).symlink_to(folder / name)


NO_FIELD = r"manifest.json has no {} that a backup could have"
FORGED = {
    **{
        f"no {name}": (without(name), NO_FIELD.format(name))
        for name in ("files", "seed", "about", "position", "stop_training")
    },
    "seed is no number": (updated(seed="x"), NO_FIELD.format("seed")),
    "no variables": (changed("about", variables=None), NO_FIELD.format(r"about\.variables")),
    "odd optimizer": (changed("about", optimizer={"0": 1}), NO_FIELD.format(r"about\.optimizer\.0")),
    "odd position": (changed("position", where=1), NO_FIELD.format(r"position\.where")),
    "a file elsewhere": (changed("files", **{"../checkpoint": {"bytes": 1}}), r"names '\.\./checkpoint'"),
    **{
        f"{tasks} tasks and {replicas} replicas": (
            updated(tasks=tasks, replicas=replicas),
            f"names {tasks} tasks and {replicas} replicas, which no run could have",
        )
        for tasks, replicas in [(0, 1), (-1, 1), (10**30, 10**30), (1, 0), (1, -1), (1, 10**30)]
    },
    "two tasks": (updated(tasks=2, replicas=2), "does not name the part rank-1"),
    "a seed of 10^30": (updated(seed=10**30), NO_FIELD.format("seed")),
    "no file named": (updated(files={}), "does not name the part shared"),
    "no part of a rank named": (
        lambda f: change_manifest(f, lambda b: b["files"].pop("rank-0.index")),
        "does not name the part rank-0",
    ),
    "no checksum of a part": (
        lambda f: change_manifest(f, lambda b: b["files"]["rank-0.index"].pop("crc32")),
        "does not name the part rank-0",
    ),
    "no part of a rank": (lambda f: (f / "step-14/rank-0.index").unlink(), "rank-0.index is missing"),
    "deep": (
        in_place("manifest.json", lambda path: path.write_text("[" * 200_000)),
        "manifest.json differs from the data written",
    ),
    "no text": (
        in_place("manifest.json", lambda path: path.write_bytes(b"\xff\xfe\x00")),
        "manifest.json differs from the data written",
    ),
    "manifest is a folder": (in_place("manifest.json", lambda path: path.mkdir()), "manifest.json is a folder"),
    "manifest is a FIFO": (in_place("manifest.json", os.mkfifo), "manifest.json is a FIFO"),
    "data are a FIFO": (in_place("rank-0.data-00000-of-00001", os.mkfifo), "is a FIFO, and should be a file"),
    "data are a link": (data_linked, "is a symbolic link to "),
    "folder is a link": (linked, "step-14 is a symbolic link to "),
    "no variable": (lambda f: change_part(f, SHARED, a=None), "does not hold variable 'a'"),
    "another shape": (lambda f: change_part(f, SHARED, a=np.zeros(3, np.float32)), r"holds 'a' as float32\[3\]"),
    "no rest": (lambda f: change_part(f, "rank-0", rest=None), "does not hold the state of callbacks"),
    "empty rest": (lambda f: change_part(f, "rank-0", rest=b"{}"), "has no callbacks that a backup could have"),
    "deep rest": (lambda f: change_part(f, "rank-0", rest=b"[" * 200_000), "differs from the data written"),
    "odd state": (
        lambda f: change_part(f, "rank-0", rest=REST.replace(b"{}", b'{"History-1": 3}')),
        r"has no callbacks\.History-1 that a backup could have",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", FORGED)
def test_the_older_one_is_used(tmp_path, capsys, case):
    write(tmp_path, 7)
    write(tmp_path, 14)
    prepare, sentence = FORGED[case]
    prepare(tmp_path)
    storage = Storage(str(tmp_path), 0, 1)
    capsys.readouterr()
    assert find_backup(storage, ALONE, ONE).point.step == 7
    [line] = capsys.readouterr().out.splitlines()
    assert line.endswith("; trying the backup before it")
    assert re.search(sentence, line), line
    shown = listing.read(str(tmp_path))
    assert [(each.point.step, each.state) for each in shown] == [(14, "damaged"), (7, "whole")]
    assert shown[0].why in line, "`tfdist backup show` gives the reason of the run"
    assert read_seed(str(tmp_path)) == 3

    storage_lib.set_damaged_aside(storage, SEVEN)
    storage.clean(after=SEVEN)
    assert not os.path.lexists(tmp_path / "step-14")
    write(tmp_path, 14)
    storage_lib.remove_damaged(str(tmp_path))
    assert find_backup(storage, ALONE, ONE).point.step == 14
    assert not list(tmp_path.glob("damaged-*"))
    if case == "folder is a link":
        assert (tmp_path / "elsewhere" / "manifest.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("name", ["step-14", "step-14/manifest.json", "checkpoint"])
def test_files_of_another_user_are_refused_by_a_run_and_by_the_list(tmp_path, name):
    write(tmp_path, 7)
    write(tmp_path, 14)
    os.chown(tmp_path / name, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"{name} belongs to user {NOBODY}") as refused:
        find_backup(Storage(str(tmp_path), 0, 1), ALONE, ONE)
    if name == "checkpoint":
        with pytest.raises(ConfigError, match=re.escape(str(refused.value))):
            listing.read(str(tmp_path))
    else:
        newest, older = listing.read(str(tmp_path))
        assert (newest.state, newest.why, older.state) == ("unreadable", str(refused.value), "whole")


def test_a_copy_under_a_larger_number_is_not_the_newest(tmp_path, capsys):
    write(tmp_path, 7)
    write(tmp_path, 14)
    shutil.copytree(tmp_path / "step-14", tmp_path / "step-99999")
    assert find_backup(Storage(str(tmp_path), 0, 1), ALONE, ONE).point.step == 14
    assert "step-99999/manifest.json is a copy of that of another backup, of step 14" in capsys.readouterr().out


def test_a_list_that_is_no_file_is_left_out(tmp_path):
    write(tmp_path, 7)
    (tmp_path / "checkpoint").unlink()
    os.mkfifo(tmp_path / "checkpoint")
    assert find_backup(Storage(str(tmp_path), 0, 1), ALONE, ONE).point.step == 7
    write(tmp_path, 14)
    assert (tmp_path / "checkpoint").is_file()


@pytest.mark.parametrize("name", [claim.FILE, f"{claim.FILE}.partial", "rank-0.probe", "checkpoint.partial"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_no_link_is_written_through(tmp_path, name, kind):
    folder, victim = tmp_path / "backup", tmp_path / "victim"
    write(folder, 7)
    victim.write_text("precious")
    (folder / name).symlink_to(victim) if kind == "link" else os.mkfifo(folder / name)
    assert find_backup(Storage(str(folder), 0, 1), ALONE, ONE).point.step == 7
    marker = Claim(str(folder), "backup_dir")
    marker.take()
    marker.check()
    write(folder, 14)
    marker.release()
    assert victim.read_text() == "precious"


def test_nothing_is_removed_through_a_link(tmp_path):
    folder, elsewhere = tmp_path / "backup", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("shared.precious", "rank-0.precious"):
        (elsewhere / name).write_text("")
    write(folder, 7)
    (folder / "step-1").symlink_to(elsewhere)
    Storage(str(folder), 0, 1).clean()
    assert len(list(elsewhere.iterdir())) == 2 and not os.path.lexists(folder / "step-1")


def test_only_what_a_callback_remembers_is_restored(tmp_path):
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras")
    forged = {"best": 0.25, "filepath": "/elsewhere.keras", "on_epoch_end": None, "state_dict": {"filepath": "x"}}
    assert state.set_callback_state(checkpoint, forged) == {"ModelCheckpoint.filepath", "ModelCheckpoint.on_epoch_end"}
    assert checkpoint.best == 0.25 and checkpoint.filepath == str(tmp_path / "model.keras")
    assert callable(checkpoint.on_epoch_end)
