"""Backups of tasks that do not share a folder: each rank has another one, as on the disks of several hosts."""

from __future__ import annotations

import json
import re

import pytest

from tests.backup.test_storage import write
from tests.helpers.once import Once
from tests.multiprocess import harness, test_resize
from tests.multiprocess.test_backup import COMPRESSION, check_equal, lives, run
from tests.multiprocess.test_resize import undisturbed  # noqa: F401 (a fixture)
from tfdist.backup.contents import SavePoint
from tfdist.backup.storage import Storage
from tfdist.runtime.folders.claim import Claim

pytestmark = pytest.mark.timeout(900)

by_grpc = pytest.fixture(scope="module", autouse=True)(harness.by_grpc)
WORKERS = "multi_worker_mirrored"


def run_compressed(once: Once):
    """Returns the results of a run without backups whose ranks have residuals."""

    def fill(folder):
        code, text, _ = run(WORKERS, folder, save_freq=0, compression=COMPRESSION)
        assert code == 0, text

    return harness.load_all(once.folder("backup_program unshared", fill))


def hosts(folder):
    """Returns the files on each of two hosts."""
    return [
        {str(path.relative_to(host)) for path in host.rglob("*") if path.is_file()}
        for host in (folder / "host-0", folder / "host-1")
    ]


def check_files(folder):
    """The chief's disk has the parts of all ranks, and the other one has no files."""
    chiefs, others = hosts(folder)
    assert not others
    assert {name.split("/")[0] for name in chiefs} == {"checkpoint", "step-28", "step-30-end"}
    manifest = Storage(str(folder / "host-0"), 0, 2).read_manifest(SavePoint(28, False))
    assert {name.split(".")[0] for name in manifest["files"]} == {"shared", "rank-0", "rank-1"}


@pytest.mark.full  # the next one resumes after a step
def test_a_run_that_is_killed_as_it_saves_resumes_to_the_bit_from_the_chiefs_disk(tmp_path, once):
    # First the manifest of step 21; then rank 1's part of step 28 has just been written.
    kills = [[0, "manifest", 3], [0, "written", 5]]
    options = {"kills": kills, "folder": str(tmp_path / "host-{rank}"), "compression": COMPRESSION}
    code, text, results = run(WORKERS, tmp_path, **options)
    assert code == 0, text
    check_equal(results, run_compressed(once))
    assert [life[0] for life in lives(tmp_path)] == [0, 14, 21]
    assert text.count("the tasks do not share backup_dir") == 3 and "(worker:1 on another disk)" in text
    check_files(tmp_path)


def test_a_chief_that_has_moved_is_refused_and_old_files_are_removed(tmp_path, once):
    options = {"folder": str(tmp_path / "host-{rank}"), "compression": COMPRESSION}
    code, text, _ = run(WORKERS, tmp_path, max_restarts=0, kills=[[1, "step", 16]], **options)
    assert code != 0, text
    first, second, spare = (tmp_path / name for name in ("host-0", "host-1", "spare"))

    def swap():
        for old, new in ((first, spare), (second, first), (spare, second)):
            old.rename(new)

    swap()
    code, text, _ = run(WORKERS, tmp_path, max_restarts=3, **options)
    assert code != 0 and "restart 1/3" not in text, text
    # The backup of step 14 may have been completed before the end.
    refusal = r"newer backup than the chief's: \S+/host-1/step-(7|14) \(worker:1\); the chief has none. Start the chief on that host"
    assert re.search(refusal, text), text
    swap()
    with Claim(second, "backup_dir"):
        code, text, _ = run(WORKERS, tmp_path, **options)
    assert (
        code != 0 and "on another host than the chief's belongs to another run, which has not ended: process" in text
    ), text
    write(second, 3, ranks=2, replicas=2)  # of an earlier chief
    code, text, results = run(WORKERS, tmp_path, **options)
    assert code == 0, text
    assert "the tasks do not share backup_dir" in text and "(worker:1 on another disk)" in text
    check_equal(results, run_compressed(once))
    assert re.search(r"resuming from step (7|14)\b", text), text
    check_files(tmp_path)


@pytest.mark.full  # test_resize.py has it with a shared folder
def test_another_number_of_replicas_continues_with_each_example_once(tmp_path, undisturbed):  # noqa: F811
    for number, (workers, kill_at) in enumerate([(4, 4), (2, 13), (4, 0)]):
        results, text = test_resize.run(tmp_path, number, workers, 1, "powersgd", kill_at, "host-{rank}")
        assert ("resuming from step" in text) == (number > 0), text
        assert ("residuals of compression are added" in text) == (number > 0), text
    history, expected = (json.loads(each["history"]) for each in (results, undisturbed("powersgd")))
    for name in ("numbers", "squares"):
        assert history[name] == expected[name]


@pytest.mark.full  # tests/multiprocess/test_backup.py has SIGTERM with a shared folder
def test_sigterm_to_a_task_without_backups_loses_no_step(tmp_path, once):
    options = {"folder": str(tmp_path / "host-{rank}"), "compression": COMPRESSION, "save_freq": 1000}
    code, text, results = run(WORKERS, tmp_path, kills=[[1, "step", 17]], signal=15, max_restarts=1, **options)
    assert code == 0, text
    check_equal(results, run_compressed(once))
    assert [step for life in lives(tmp_path, 1) for step in life] == list(range(30)), "each step once"
