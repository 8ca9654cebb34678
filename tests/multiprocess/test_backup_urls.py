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
