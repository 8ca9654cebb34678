"""All tasks of a job with parameter servers end, however its chief, its workers or its servers do."""

import sys
import time

import pytest

from tests.helpers import fork_server
from tests.multiprocess.roles import Roles

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("what", "workers", "ps", "sentence"),
    [
        ("servers", 1, 2, "tfdist.errors.ClusterError: ps:1 is lost"),
        ("workers", 2, 1, "tfdist.errors.ClusterError: No worker has worked for"),
        pytest.param(
            "error", 1, 1, "Received a label value of 9 which is outside the valid range", marks=pytest.mark.slow
        ),
        ("interrupt", 1, 1, "KeyboardInterrupt"),
    ],
)
def test_all_roles_end(tmp_path, what, workers, ps, sentence):
    command = fork_server.command("tests.multiprocess.ps_end_program", what)
    with Roles(command, tmp_path / "roles", workers, ps) as roles:
        while "it happens" not in roles.log("chief:0") and roles.processes["chief:0"].poll() is None:
            time.sleep(0.05)
        happened = time.monotonic()
        assert roles.wait("chief:0", 120) not in (0, None)
        assert time.monotonic() - happened < 100  # a server that is given up alone would take the 300 s of a start
        log = roles.log("chief:0")
        assert sum(sentence in line for line in log.splitlines()) == 1, log
        killed = {"servers": {"ps:1"}, "workers": {"worker:0", "worker:1"}}.get(what, set())
        for task in set(roles.processes) - killed - {"chief:0"}:
            assert roles.wait(task, 60) == 1, "or a scheduler would think that it has finished"
            assert "ends with exit code 1, like the chief\n" in roles.log(task)


@pytest.mark.parametrize(
    ("what", "chiefs", "others", "said"),
    [
        ("chief", -9, 1, "ends with exit code 1: the chief has ended without sending its exit code"),
        pytest.param("exit", 3, 3, "ends with exit code 3, like the chief\n", marks=pytest.mark.slow),
    ],
)
def test_those_who_serve_end_as_the_chief_does(tmp_path, what, chiefs, others, said):
    command = fork_server.command("tests.multiprocess.ps_end_program", what)
    with Roles(command, tmp_path / "roles", 1, 1) as roles:
        assert roles.wait("chief:0", 90) == chiefs
        for task in ("worker:0", "ps:0"):
            assert roles.wait(task, 60) == others
            assert said in roles.log(task)


@pytest.mark.slow
def test_the_same_command_serves_or_trains_under_tf_config(tmp_path):
    options = ["--config.epochs=1", "--config.steps_per_epoch=4", f"--workdir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "tfdist.train", "--config=digits_parameter_server", *options]
    with Roles(command, tmp_path / "roles", workers=1, ps=1) as roles:
        assert roles.wait("chief:0", 120) == 0, roles.log("chief:0")
        assert [roles.wait(task, 60) for task in roles.processes] == [0] * 3
        assert "ends with exit code 0, like the chief" in roles.log("worker:0")
    assert (tmp_path / "run" / "summary.json").exists()
