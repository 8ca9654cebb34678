"""The choice of a compressor between real processes: equal on all ranks, left if it loses too much, and kept by a resumed run."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.timeout(600)


def run(out, kill_after, per_execution=1):
    """Returns each rank's results, and the output."""
    words = [sys.executable, "-m", "tests.multiprocess.codec_program", "multi_worker_mirrored", str(out)]
    launch = [
        sys.executable,
        "-m",
        "tfdist.launch",
        "--workers=2",
        "--max_restarts=1",
        f"--log_dir={out / 'logs'}",
        "--",
    ]
    done = subprocess.run(
        [*launch, *words, str(kill_after), str(per_execution)],
        env={**os.environ, "PYTHONPATH": str(harness.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=harness.TIMEOUT,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    return [harness.load(out, rank) for rank in range(2)], shown


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"), 0)


def test_the_fastest_is_chosen_and_left_when_it_loses_too_much(undisturbed):
    ranks, shown = undisturbed
    assert ranks[0]["used"] == ranks[1]["used"]
    used = [name for _, name in ranks[0]["used"]]
    assert used[:5] == ["Late"] * 5 and used[20:100] == ["Short"] * 80 and set(used[101:]) == {"Late"}
    assert "Short() -> Late() at step 100: relative error 0.1 > 0.02" in shown
    for found in ranks:
        assert found["selection"] == (0, 0)
        assert found["measures"]["step"] == 200 and found["measures"]["relative_error"] == 0
        assert harness.difference(found["weights"], ranks[0]["weights"]) == 0


@pytest.mark.parametrize("kill_after", [75, 125])
def test_a_resumed_run_keeps_the_choice_and_its_bits(tmp_path, undisturbed, kill_after):
    ranks, shown = run(tmp_path, kill_after)
    assert "restart 1/1" in shown
    chosen = "Short" if kill_after < 100 else "Late"
    for found in ranks:
        assert found["used"][0][1] == chosen and found["used"][0][0] > 20
        for mine, other in zip(found["weights"], undisturbed[0][0]["weights"], strict=True):
            np.testing.assert_array_equal(mine, other)
