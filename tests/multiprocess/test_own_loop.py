"""A loop of your own around `trainer.step` goes on to the bit; tests/cases/sources/own_loop.py compares loops with plain ones."""

import os

import pytest

from tests.helpers import fork_server, tiers
from tests.multiprocess import harness
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

STRATEGIES = tiers.cases(["one_device", "mirrored", "multi_worker_mirrored"], quick=["multi_worker_mirrored"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_that_was_killed_goes_on_to_the_bit(tmp_path, strategy):
    whole = harness.run("own_loop_program", strategy, tmp_path / "whole", "0")
    workers = len(whole)
    command = fork_server.command("tests.multiprocess.own_loop_program", strategy, str(tmp_path), "7")
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    launched = Launcher(
        Options(["timeout", "300", *command], local_cluster(workers), tmp_path / "logs", environ, max_restarts=1)
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
