"""Workers with unequal parts of each batch are killed, and resume to the bit."""

import io
import os
import shutil

import numpy as np
import pytest

from tests.helpers import fork_server
from tests.multiprocess import harness
from tfdist.cluster import local_cluster
from tfdist.launch.launcher import Launcher
from tfdist.launch.options import Options

pytestmark = pytest.mark.timeout(600)


def run(out, kill_at=0, max_restarts=0):
    """Returns the exit code and what the launcher has shown."""
    command = fork_server.command("tests.multiprocess.shares_program", str(out), str(kill_at))
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    shown = io.BytesIO()
    limited = ["timeout", "-k", "5", "300", *command]
    options = Options(limited, local_cluster(2), out / "logs", environ, max_restarts=max_restarts)
    code = Launcher(options, output=shown).run()
    return code, shown.getvalue().decode()


def test_shares_that_have_been_chosen_are_the_same_after_a_kill(tmp_path):
    code, text = run(tmp_path / "first", kill_at=75)  # the shares are chosen within 55 steps
    assert code != 0 and "batch shares by speed" in text, text
    results = {}
    for name, how in (("undisturbed", {}), ("killed", {"kill_at": 88, "max_restarts": 1})):
        shutil.copytree(tmp_path / "first" / "backup", tmp_path / name / "backup")
        code, text = run(tmp_path / name, **how)
        assert code == 0, text
        assert "batch shares by speed" not in text, "they are not chosen again"
        results[name] = [harness.load(tmp_path / name, rank) for rank in range(2)]
    assert "restart 1/1" in text
    first, *others = [result for both in results.values() for result in both]
    assert first["begun"] in (60, 70) and results["killed"][0]["begun"] > first["begun"]
    assert first["shares"][0] < first["shares"][1]
    for other in others:
        assert other["shares"] == first["shares"]
        for mine, its in zip(first["weights"], other["weights"], strict=True):
            np.testing.assert_array_equal(mine, its)
