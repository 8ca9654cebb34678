"""Backups on disk: what is torn or flipped shows, and the one before it is taken."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.backup import pieces
from tfdist.backup import storage as storage_lib
from tfdist.backup.contents import BEFORE_ALL, FORMAT, SHARED, SavePoint, part_of
from tfdist.backup.search import Size, find_backup
from tfdist.backup.state import replica_key
from tfdist.backup.storage import CorruptBackupError, Storage
from tfdist.collectives.ranks import Ranks
from tfdist.errors import BackupError, ConfigError
from tfdist.runtime.folders.finished_training import remove_backups
from tfdist.sharding.split import split_rows

ALONE, ONE = Ranks(None, 0, ["worker:0"]), Size(1, 1)


SEVEN, FOURTEEN = SavePoint(7, False), SavePoint(14, False)
REST = b'{"callbacks": {}, "synchronized": true, "logs": null}'


def write(folder, step, keep=2, ranks=1, replicas=1, epoch_ended=False):
    """Writes a backup as all ranks together do."""
    point = SavePoint(step, epoch_ended)
    all_ranks = [Storage(str(folder), rank, ranks) for rank in range(ranks)]
    for one in reversed(all_ranks):
        local = replicas // ranks
        own = {
            replica_key(number, "own"): np.full(100, step + number, np.float32)
            for number in range(one.rank * local, one.rank * local + local)
        }
        one.write_part(point, part_of(one.rank), {**own, "of the task": np.int64(one.rank), "rest": REST})
    all_ranks[0].write_part(point, SHARED, {"a": np.arange(1000, dtype=np.float32) * step, "b/c": np.int64(step)})
    values = {
        "format": FORMAT,
        "tasks": ranks,
        "replicas": replicas,
        "seed": 3,
        "stop_training": False,
        "step": step,
        "position": {"step": step, "epoch": 1, "epoch_step": 0 if epoch_ended else 2, "passes": 1, "drawn": step},
        "about": {
            "fit": {},
            "optimizer": {},
            "variables": {"a": "float32[1000]", "b/c": "int64[]", "own": "float32[100]"},
        },
    }
    all_ranks[0].write_manifest(point, values, keep)
    for one in all_ranks[1:]:
        one.clean()


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in pathlib.Path(folder).rglob("*") if path.is_file())


def test_what_is_written_is_read(tmp_path):
    assert find_backup(Storage(str(tmp_path / "new"), 0, 1), ALONE, ONE) is None
    write(tmp_path, 7)
    write(tmp_path, 14)
    found = find_backup(Storage(str(tmp_path), 0, 1), ALONE, ONE)
    assert (found.point, found.manifest["step"]) == (FOURTEEN, 14)
    np.testing.assert_array_equal(found.shared["a"], np.arange(1000, dtype=np.float32) * 14)
    assert found.shared["a"].dtype == np.float32
    assert (found.shared["b/c"], found.own[replica_key(0, "own")][0], bytes(found.own["rest"])) == (14, 14, REST)


def test_of_two_backups_of_a_step_the_one_of_the_epochs_end_is_newer(tmp_path):
    for step, epoch_ended in ((9, True), (10, True), (10, False), (9, False)):
        write(tmp_path, step, keep=9, epoch_ended=epoch_ended)
    folders = ["step-10-end", "step-10", "step-9-end", "step-9"]
    assert [point.folder for point in Storage(str(tmp_path), 0, 1).points()] == folders
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "step-10-end" / SHARED)
    found = find_backup(Storage(str(tmp_path), 0, 1), ALONE, ONE)
    assert found.point == SavePoint(10, True)
    storage_lib.set_damaged_aside(Storage(str(tmp_path), 0, 1), SavePoint(9, True))
    storage_lib.remove_damaged(str(tmp_path))
    assert {path.parent.name for path in tmp_path.rglob("manifest.json")} == {"step-9-end", "step-9"}


def test_a_folder_that_is_named_like_a_backup_may_hold_backups(tmp_path):
    write(tmp_path / "step-3", 7)
    assert Storage(str(tmp_path / "step-3"), 0, 1).completed() == {SEVEN}


def test_tensorflow_reads_them_too(tmp_path):
    write(tmp_path, 7)
    latest = tf.train.latest_checkpoint(str(tmp_path))
    assert latest == str(tmp_path / "step-7" / SHARED)
    assert dict(tf.train.list_variables(latest)) == {"a": [1000], "b/c": []}


def test_only_the_newest_are_kept_and_the_manifest_names_all_their_files(tmp_path):
    for step in (7, 14, 21, 28):
        write(tmp_path, step, keep=2, ranks=4, replicas=4)
    expected = {"checkpoint"}
    for step in (21, 28):
        manifest = Storage(str(tmp_path), 0, 4).read_manifest(SavePoint(step, False))
        expected |= {f"step-{step}/{name}" for name in (*manifest["files"], "manifest.json")}
    assert set(files(tmp_path)) == expected
    assert len(expected) == 1 + 2 * (2 * 5 + 1)


def damage(kind, path):
    content = path.read_bytes()
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :])


FILES = ["manifest.json", *(f"{part}.{end}" for part in (SHARED, "rank-0") for end in ("index", "data-00000-of-00001"))]


@pytest.mark.parametrize("kind", ["truncate", "flip", "delete"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_backup_is_left_for_the_one_before_it(tmp_path, capsys, kind, name):
    write(tmp_path, 7)
    write(tmp_path, 14)
    damage(kind, tmp_path / "step-14" / name)
    storage = Storage(str(tmp_path), 0, 1)
    assert find_backup(storage, ALONE, ONE).point.step == 7
    line = capsys.readouterr().out
    assert "step-14" in line and "trying the backup before it" in line
    storage_lib.set_damaged_aside(storage, SEVEN)
    storage.clean(after=SEVEN)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "step-7", "damaged-step-14"}

    damage(kind, tmp_path / "step-7" / name)
    with pytest.raises(BackupError, match=r"holds backups, but none is whole: .*step-7.*remove that folder"):
        find_backup(Storage(str(tmp_path), 0, 1), ALONE, ONE)
    assert (tmp_path / "step-7").exists(), "what there is left is not thrown away"


def test_a_file_in_the_place_of_a_backup_is_passed_over(tmp_path, capsys):
    write(tmp_path, 7)
    (tmp_path / "step-99").write_text("")
    assert find_backup(Storage(str(tmp_path), 0, 1), ALONE, ONE).point.step == 7


@pytest.mark.parametrize("name", FILES[1:])
def test_every_byte_counts(tmp_path, name):
    write(tmp_path, 7)
    path = tmp_path / "step-7" / name
    content = path.read_bytes()
    one = Storage(str(tmp_path), 0, 1)
    for place in range(0, len(content), 1 if len(content) < 500 else 97):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(CorruptBackupError):
            one.read_manifest(SEVEN)
            one.read_part(SEVEN, SHARED)
            one.read_part(SEVEN, "rank-0")


def test_one_that_was_never_finished_is_no_backup(tmp_path, capsys):
    one = Storage(str(tmp_path), 0, 1)
    one.write_part(SEVEN, part_of(one.rank), {"own": np.zeros(3)})
    assert find_backup(one, ALONE, ONE) is None, "nothing is lost"
    one.clean(after=BEFORE_ALL)
    assert files(tmp_path) == []
    write(tmp_path, 7)
    one.write_part(FOURTEEN, part_of(one.rank), {"own": np.zeros(3)})
    assert find_backup(one, ALONE, ONE).point.step == 7
    assert "step-14 was not finished" in capsys.readouterr().out


def test_what_is_left_of_a_write_is_removed(tmp_path):
    write(tmp_path, 7)
    folder = tmp_path / "step-14"
    folder.mkdir()
    for name in ("rank-0.data-00000-of-00001.tempstate123", "shared.data-00000-of-00001", "manifest.json.partial"):
        (folder / name).write_text("half")
    (folder / "rank-1.index").write_text("another rank's")
    Storage(str(tmp_path), 0, 2).clean(after=SEVEN)
    assert files(folder) == ["rank-1.index"]
    Storage(str(tmp_path), 0, 1).clean(after=SEVEN)  # whose run has no rank 1
    assert not folder.exists()


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (1, 2)])
def test_another_number_of_tasks_under_parameter_servers_is_rejected(tmp_path, ranks, replicas):
    write(tmp_path, 7, ranks=ranks, replicas=replicas)
    with pytest.raises(
        ConfigError, match=rf"made with tasks: {ranks}, replicas: 2; this run has tasks: 1, replicas: 1"
    ):
        find_backup(Storage(str(tmp_path), 0, 1), ALONE, Size(1, 1, is_fixed=True))
    assert (tmp_path / "step-7" / "manifest.json").exists()


@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_a_rank_reads_its_replicas_from_the_parts_of_any_number_of_ranks(tmp_path, monkeypatch, saved, tasks):
    monkeypatch.setattr(Ranks, "gather", lambda self, *numbers: np.array([numbers] * self.size, np.float64))
    write(tmp_path, 7, ranks=saved, replicas=4)
    local = 4 // tasks
    for rank in reversed(range(tasks)):
        for other in range(tasks):
            (tmp_path / f"rank-{other}.probe").write_text("x")
        ranks = Ranks(None, rank, ["worker:0"] * tasks)
        own = find_backup(Storage(str(tmp_path), rank, tasks), ranks, Size(tasks, 4)).own
        for replica in range(rank * local, rank * local + local):
            np.testing.assert_array_equal(own[replica_key(replica, "own")], 7 + replica)
        assert own["of the task"] == rank * local // (4 // saved)


def test_another_number_of_replicas_reads_all_of_them(tmp_path):
    write(tmp_path, 7, ranks=2, replicas=4)
    own = find_backup(Storage(str(tmp_path), 0, 1), ALONE, Size(1, 3)).own
    assert [own[replica_key(replica, "own")][0] for replica in range(4)] == [7, 8, 9, 10]
    assert own["of the task"] == 0


def test_another_format_is_rejected_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "FORMAT", 1)
    write(tmp_path, 7)
    with pytest.raises(ConfigError, match=r"it has format 1, and this version reads format 4"):
        find_backup(Storage(str(tmp_path), 0, 1), ALONE, ONE)


def test_the_manifest_waits_for_all_parts(tmp_path):
    chief, other = (Storage(str(tmp_path), rank, 2) for rank in range(2))
    for part in (part_of(chief.rank), SHARED):
        chief.write_part(SEVEN, part, {"x": np.zeros(3)})
    thread = threading.Thread(target=chief.write_manifest, args=(SEVEN, {}, 2))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not (tmp_path / "step-7" / "manifest.json").exists()
    other.write_part(SEVEN, part_of(other.rank), {"x": np.zeros(3)})
    thread.join(30)
    assert (tmp_path / "step-7" / "manifest.json").exists()


def test_a_part_that_does_not_come_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_lib, "PARTS_TIMEOUT", 0.1)
    chief = Storage(str(tmp_path), 0, 2)
    for part in (part_of(chief.rank), SHARED):
        chief.write_part(SEVEN, part, {"x": np.zeros(3)})
    with pytest.raises(
        BackupError, match=r"step-7/rank-1.index has not appeared .* backup_dir must be a folder that all tasks share"
    ):
        chief.write_manifest(SEVEN, {}, 2)


def test_removing_all_leaves_what_is_not_ours(tmp_path):
    folder = tmp_path / "backup"
    for step in (7, 14):
        write(folder, step, ranks=2, replicas=2)
    (folder / "notes.txt").write_text("mine")
    remove_backups(str(folder))
    assert files(folder) == ["notes.txt"]
    (folder / "notes.txt").unlink()
    remove_backups(str(folder))
    assert not folder.exists()


def write_rows(folder):
    """Writes a table of 300 MB. Prints the most memory that the write took beyond it, in MB."""

    def memory(kind):
        (line,) = [each for each in pathlib.Path("/proc/self/status").read_text().splitlines() if each.startswith(kind)]
        return int(line.split()[1]) // 1024

    rows = 1_200_000
    variable = tf.Variable(tf.repeat(tf.range(rows, dtype=tf.float32)[:, None], 64, axis=1))
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
    before = memory("VmRSS")
    (index,) = split_rows((rows, 64), 1).indices
    tensors = {pieces.piece_key(index, "table"): pieces.ServerRows(variable, (rows, 64))}
    shape = {pieces.shape_key("table"): tf.constant((rows, 64), tf.int64)}
    Storage(folder, 0, 1).write_part(SavePoint(1, False), SHARED, tensors | shape)
    print("beyond the table:", memory("VmHWM") - before)


@pytest.mark.full
def test_rows_of_a_server_are_written_in_chunks(tmp_path):
    program = f"from tests.backup import test_storage; test_storage.write_rows({str(tmp_path)!r})"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert int(output.split("beyond the table:")[1]) < 200
    table = np.asarray(Storage(str(tmp_path), 0, 1).read_shared(SavePoint(1, False), 1)["table"])
    np.testing.assert_array_equal(table[:, 0], np.arange(1_200_000))
    np.testing.assert_array_equal(table[:, 63], table[:, 0])
