"""Loops of your own around `trainer.step` train what a plain eager loop does, and go on to the bit."""

import os

import pytest

from tests.helpers import fork_server, tiers
from tests.multiprocess import harness
from tests.multiprocess.roles import Roles
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher

STRATEGIES = tiers.cases(["one_device", "mirrored", "multi_worker_mirrored"], quick=["multi_worker_mirrored"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    (found,) = harness.run("own_loop_program", "plain", tmp_path_factory.mktemp("plain"), "adversaries", "0")
    return found


def differs(found, expected):
    """Returns by how much two runs differ, but for seeds, of which each replica has its own."""
    parts = ("logs", "weights", "optimizers")
    return harness.difference([found[part] for part in parts], [expected[part] for part in parts])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adversaries_learn_what_a_plain_loop_teaches_them(tmp_path, plain, strategy):
    for found in harness.run("own_loop_program", strategy, tmp_path, "adversaries", "0"):
        assert len(found["logs"]) == 4 * 3  # of 7, 7 and 6 examples
        assert differs(found, plain) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker_mirrored"])
def test_each_process_may_give_a_batch_of_its_own(tmp_path, strategy):
    (plain,) = harness.run("own_loop_program", "plain", tmp_path / "plain", "whole_batches", "0")
    for found in harness.run("own_loop_program", strategy, tmp_path / "found", "whole_batches", "0"):
        assert len(found["logs"]) == 4 and differs(found, plain) < 1e-5


@pytest.mark.full
def test_a_server_learns_it_too(tmp_path, plain):
    command = fork_server.command(
        "tests.multiprocess.own_loop_program", "parameter_server", str(tmp_path / "out"), "adversaries", "0"
    )
    with Roles(command, tmp_path / "roles", workers=1, ps=1) as roles:
        assert roles.wait("chief:0", 300) == 0, roles.log("chief:0")
    assert differs(harness.load(tmp_path / "out", 0), plain) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_that_was_killed_goes_on_to_the_bit(tmp_path, strategy):
    whole = harness.run("own_loop_program", strategy, tmp_path / "whole", "resumed", "0")
    workers = len(whole)
    command = fork_server.command("tests.multiprocess.own_loop_program", strategy, str(tmp_path), "resumed", "7")
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    launched = Launcher(
        ["timeout", "300", *command], local_cluster(workers), tmp_path / "logs", environ, max_restarts=1
    )
    assert launched.run() == 0
    log = (tmp_path / "logs/worker-0.log").read_text()
    assert "resuming from step 4 (step 1 of epoch 2)" in log
    for rank, expected in enumerate(whole):
        found = harness.load(tmp_path, rank)
        assert len(found["logs"]) == 4 * 3 - 4
        assert harness.difference(found["logs"], expected["logs"][4:]) == 0.0
        for part in ("weights", "optimizers", "seeds"):
            assert harness.difference(found[part], expected[part]) == 0.0
    if workers == 2:
        assert harness.difference(whole[0]["weights"], whole[1]["weights"]) == 0.0
