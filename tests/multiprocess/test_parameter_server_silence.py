"""A worker or server that is stopped: nothing ends, and nothing answers."""

import subprocess
import sys
import time

import pytest

from tests.helpers import two_hosts
from tests.multiprocess.roles import Roles, RolesOnTwoHosts

# Without the fork server: a signal to its client would stop the client.
COMMAND = [sys.executable, "-m", "tests.multiprocess.ps_silent_program"]


@pytest.mark.full
@pytest.mark.parametrize("where", ["fit", "function", "evaluate", "predict"])
def test_the_others_go_on_without_a_stopped_worker_which_comes_back(tmp_path, where):
    with Roles([*COMMAND, "worker:1", where], tmp_path / "roles", workers=2, ps=1) as roles:
        assert roles.wait("chief:0", 180) == 0, roles.log("chief:0")
        log = roles.log("chief:0")
        address = roles.cluster.jobs["worker"][1]
        assert f"chief:0 waits for worker:1 at {address}: no answer for" in log
        assert f"worker:1 at {address} is given up after" in log
        assert "without it" in log and "all steps" in log
        assert [roles.wait(task, 90) for task in ("worker:0", "worker:1", "ps:0")] == [0, 0, 0]


@pytest.mark.full
@pytest.mark.parametrize("where", ["fit", "function", "evaluate", "predict"])
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
        assert [roles.wait(task, 90) for task in ("worker:0", "worker:1")] == [1, 1]


@pytest.mark.full
@pytest.mark.parametrize("call", ["checkpoint", "first_fit_call", "function", "read", "assign", "save", "exit"])
def test_whatever_the_chief_does_with_a_stopped_server_ends(tmp_path, call):
    command = [sys.executable, "-m", "tests.multiprocess.ps_silent_call_program", call]
    with Roles(command, tmp_path / "roles", workers=1, ps=1) as roles:
        assert roles.wait("chief:0", 150) == 1, roles.log("chief:0")
        log = roles.log("chief:0")
        assert "it happens" in log and "it went on" not in log
        if call != "exit":
            assert "chief:0 waits for ps:0" in log
        if call in ("first_fit_call", "save"):
            assert "tfdist.errors.ClusterError: ps:0 is lost" in log
        assert roles.wait("worker:0", 90) == 1


class Unplugged(RolesOnTwoHosts):
    """To stop the task that is on a host of its own is to unplug that host, without a word to its connections."""

    def send(self, what, task):
        assert task == self.away
        state = {"stop": "down", "continue": "up"}[what]
        if what == "continue":
            time.sleep(15)  # longer than a worker would wait for a chief that has ended
        end = r"$(ip -o link | sed -n 's/^[0-9]*: \(tf[^@:]*\).*/\1/p')"
        subprocess.run([*self.hosts[1], "sh", "-c", f"ip link set {end} {state}"], check=True)


@pytest.mark.full
@pytest.mark.parametrize("away", ["worker:1", "ps:0"])
def test_a_host_is_unplugged(tmp_path, away):
    if reason := two_hosts.missing():
        pytest.skip(reason)
    with (
        two_hosts.two(tmp_path) as hosts,
        Unplugged([*COMMAND, away, "fit"], tmp_path / "roles", hosts, away) as roles,
    ):
        assert roles.wait("chief:0", 180) == (away == "ps:0"), roles.log("chief:0")
        log = roles.log("chief:0")
        assert f"chief:0 waits for {away}" in log
        if away == "ps:0":
            assert "tfdist.errors.ClusterError: ps:0 is lost, and with it the variables it held" in log
        else:
            assert "worker:1 is back" in log and "all steps" in log
