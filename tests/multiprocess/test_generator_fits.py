"""Several `fit`s on one generator resume in the one that was killed."""

import os

import pytest

from tests.helpers import fork_server
from tests.multiprocess import harness
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

pytestmark = pytest.mark.timeout(600)

STRATEGIES = ["mirrored", "multi_worker_mirrored"]


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_killed_in_the_second_fit_resumes_to_the_bit(tmp_path, strategy):
    whole = harness.run("generator_fits_program", strategy, tmp_path / "whole", "0")
    command = fork_server.command("tests.multiprocess.generator_fits_program", strategy, str(tmp_path), "4")
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    cluster = local_cluster(len(whole))
    launched = Launcher(Options(["timeout", "300", *command], cluster, tmp_path / "logs", environ, max_restarts=1))
    assert launched.run() == 0
    assert "resuming from step 2 " in (tmp_path / "logs/worker-0.log").read_text()
    for rank, expected in enumerate(whole):
        found = harness.load(tmp_path, rank)
        assert (expected["steps"], found["steps"]) == ([6, 6, 6], [0, 4, 6])
        assert found["histories"][1:] == expected["histories"][1:]
        for part in ("weights", "following"):
            assert harness.difference(found[part], expected[part]) == 0.0
