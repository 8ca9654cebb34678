"""A worker or server that is stopped: nothing ends, and nothing answers."""

import sys

import pytest

from tests.multiprocess.roles import Roles

# Without the fork server: a signal to its client would stop the client.
COMMAND = [sys.executable, "-m", "tests.multiprocess.ps_silent_program"]


@pytest.mark.full
@pytest.mark.parametrize("where", ["fit", "evaluate", "predict"])
def test_the_others_go_on_without_a_stopped_worker_which_comes_back(tmp_path, where):
    with Roles([*COMMAND, "worker:1", where], tmp_path / "roles", workers=2, ps=1) as roles:
        assert roles.wait("chief:0", 180) == 0, roles.log("chief:0")
        log = roles.log("chief:0")
        address = roles.cluster.jobs["worker"][1]
        assert f"chief:0 waits for worker:1 at {address}: no answer for" in log
        assert f"worker:1 at {address} is given up after" in log
        assert "without it" in log and "all steps" in log
        assert [roles.wait(task, 30) for task in ("worker:0", "worker:1", "ps:0")] == [0, 0, 0]


@pytest.mark.full
@pytest.mark.parametrize("where", ["fit", "evaluate", "predict"])
def test_a_stopped_server_ends_the_job_by_name(tmp_path, where):
    with Roles([*COMMAND, "ps:0", where], tmp_path / "roles", workers=2, ps=1) as roles:
        assert roles.wait("chief:0", 180) == 1, roles.log("chief:0")
        log = roles.log("chief:0")
        address = roles.cluster.jobs["ps"][0]
        assert f"chief:0 waits for ps:0 at {address}: no answer for" in log
        assert "without it" not in log
        sentence = (
            f"tfdist.errors.ClusterError: ps:0 is lost, and with it the variables it held: ps:0 at {address} (no answer"
        )
        assert sum(sentence in line for line in log.splitlines()) == 1, log
        assert [roles.wait(task, 30) for task in ("worker:0", "worker:1")] == [1, 1]
