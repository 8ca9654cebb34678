"""Arrays in files that are larger than memory, under a limit of a tenth of them, and records: a killed training resumes to the bit."""

import os
import signal
import subprocess
import sys

import pytest

from tests.multiprocess import harness


def end(run):
    return run.stdout.splitlines()[-1]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["arrays", "records"])
def test_a_killed_training_resumes_within_a_tenth_of_the_memory(tmp_path, kind):
    def run(backups, dies_at):
        command = [
            sys.executable,
            "-m",
            "tests.backup.arrays_program",
            tmp_path / "files",
            tmp_path / backups,
            str(dies_at),
            kind,
        ]
        environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)

    through = run("whole", 0)
    assert through.returncode == 0, through.stderr
    assert run("killed", 13).returncode == -signal.SIGKILL
    resumed = run("killed", 0)
    (steps, weights), (all_steps, expected) = (end(run).split(" steps, ") for run in (resumed, through))
    assert (int(all_steps), weights) == (24, expected)
    assert int(steps) in (14, 19), "from step 10; from step 5, if the backup of step 10 was still being written"
    assert "will not be exact" not in resumed.stderr + through.stderr
