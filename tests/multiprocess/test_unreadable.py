"""A backup that one worker cannot use: all decide the same, none hangs, and nothing is lost."""

import io
import os

import pytest

from tests.helpers import fork_server
from tests.helpers.unprivileged import open_folder
from tests.multiprocess import harness
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options


@pytest.mark.timeout(240)
def test_all_workers_decide_the_same(tmp_path):
    with open_folder() as folder:
        chief, worker = harness.run("unreadable_program", "multi_worker_mirrored", tmp_path, str(folder))
    there = ["step-4", "step-4-end"]
    for mine in (chief, worker):
        assert mine["first"] == (4, [], there)
        assert mine["unreadable"][1:] == ([], there), "nothing was trained or removed"
        assert mine["unreadable"][0].startswith("BackupError: ")
        assert (
            "rank-1.index cannot be read: Permission denied (worker:1). The backup may be whole"
            in mine["unreadable"][0]
        )
    for mine in (chief, worker):
        if "another's" in mine:
            assert "step-4-end/shared.index belongs to user 12345" in mine["another's"][0]
            assert mine["another's"][1:] == ([], there)
        steps, first, last = mine["torn"]
        assert (steps, first) == (4, ["damaged-step-4-end", "step-4"]), "the older one is used, the torn one is kept"
        assert last == ["step-8", "step-8-end"], "until the next one is complete"


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_restart_without_the_storage_trains_nothing(tmp_path):
    command = [
        "timeout",
        "-k",
        "5",
        "120",
        *fork_server.command("tests.multiprocess.lost_storage_program", str(tmp_path)),
    ]
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    shown = io.BytesIO()
    launcher = Launcher(Options(command, local_cluster(1, 0), tmp_path / "logs", environ, max_restarts=1), output=shown)
    assert launcher.run() != 0
    assert "holds no backup, though this run saved one there before it was restarted" in shown.getvalue().decode()
    assert [path.name for path in tmp_path.glob("steps-*")] == ["steps-0"]
    assert list((tmp_path / "elsewhere").glob("step-*/manifest.json"))
