"""Backups at a URL, by two workers that are killed in the middle of an upload: nothing older is lost, and the run equals an undisturbed one."""

from __future__ import annotations

import pytest

from tests.helpers.s3 import SECRET, s3  # noqa: F401 (a fixture)
from tests.multiprocess import harness
from tests.multiprocess.test_backup import check_equal, lives, run, run_uninterrupted

pytestmark = pytest.mark.timeout(900)

by_grpc = pytest.fixture(scope="module", autouse=True)(harness.by_grpc)
WORKERS = "multi_worker_mirrored"


@pytest.mark.parametrize(
    "kills",
    [
        # Each part is two files; the chief also uploads the shared part.
        pytest.param([[1, "upload", 4], [0, "upload", 3]], id="uploads"),
        pytest.param([[0, "manifest", 2], ["worker:1", "manifest", 1]], id="manifest", marks=pytest.mark.full),
    ],
)
def test_a_worker_that_is_killed_during_an_upload_loses_nothing_older(tmp_path, once, s3, kills):  # noqa: F811
    code, text, results = run(WORKERS, tmp_path, kills=kills, folder=f"{s3.url}/run", backup={"keep": 1})
    assert code == 0, text
    check_equal(results, run_uninterrupted(once, WORKERS))
    assert [life[0] for life in lives(tmp_path)] == [0, 7, 7], "the newest complete backup is used"
    assert {name.split("/")[1] for name in s3.files()} == {"checkpoint", "step-30-end"}, "no leftovers"
    output = text + "".join(path.read_text() for path in (tmp_path / "logs").glob("*.log"))
    assert SECRET not in output


FIRST, LAST = "/run/step-4/", "/run/step-12-end/"


def fail_first_and_last(path):
    """Answers the uploads of the worker's part of the first backup, and of the last one."""
    if f"{FIRST}rank-1" in path:
        return 500
    if f"{LAST}rank-1" in path:
        return 403
    return None


@pytest.mark.parametrize(
    ("fails", "warned", "error", "kept"),
    [
        # The worker's part of the first backup: all agree that it is lost, and the next one is complete. Nobody may write
        # the last one: the training has been done, and ends with an error on both.
        pytest.param(
            fail_first_and_last,
            ("this task's part of the backup step-4 could not be uploaded: ", "(worker:1). The training continues; there is no backup yet; the next"),
            f"BackupError: The last backup, step-12-end, could not be uploaded: s3://backups{LAST}rank-1.data-00000-of-00001 cannot be written: no "
            "permission (AccessDenied of the test) (worker:1). The newest backup is step-12. Check",
            {"step-8", "step-12"},
            marks=pytest.mark.full,
        ),
        (
            lambda path: 403 if "rank-1.probe" in path else None,
            (),
            "ConfigError: backup_dir 's3://backups/run' cannot be written to: s3://backups/run/rank-1.probe cannot be written: no permission "
            "(AccessDenied of the test) (worker:1). Does the bucket exist",
            set(),
        ),
    ],
    ids=["500 first and 403 at the end", "403 at the start"],
)  # fmt: skip
def test_all_workers_decide_the_same_on_a_failed_upload(tmp_path, s3, fails, warned, error, kept):  # noqa: F811
    s3.rule = lambda method, path, body: fails(path) if method == "PUT" else None
    results = harness.run("failing_upload_program", WORKERS, tmp_path, f"{s3.url}/run")
    for mine in results:
        assert mine["error"].startswith(error) and bool(mine["error"]) == bool(error), mine["error"]
        assert mine["steps"] == (0 if "ConfigError" in error else 12), "it trains on"
    output = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.log"))
    assert all(text in output for text in warned), output
    assert {name.split("/")[1] for name in s3.files() if name.endswith("manifest.json")} == kept
    assert SECRET not in output
