"""A killed training on files resumes to the bit: under a limit of a tenth of their memory, and with any state of a cache."""

import os
import signal
import subprocess
import sys

import pytest

from tests.multiprocess import harness


def end(run):
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1].split(" steps, ")


def start(program, *arguments):
    command = [sys.executable, "-m", f"tests.backup.{program}", *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["arrays", "records"])
def test_a_killed_training_resumes_within_a_tenth_of_the_memory(tmp_path, kind):
    def run(backups, dies_at):
        return start("arrays_program", tmp_path / "files", tmp_path / backups, dies_at, kind)

    through = run("whole", 0)
    assert run("killed", 13).returncode == -signal.SIGKILL
    resumed = run("killed", 0)
    (steps, weights), (all_steps, expected) = (end(run) for run in (resumed, through))
    assert (int(all_steps), weights) == (24, expected)
    assert int(steps) in (14, 19), "from step 10; from step 5, if the backup of step 10 was still being written"
    assert "will not be exact" not in resumed.stderr + through.stderr


@pytest.mark.timeout(300)
def test_a_killed_training_resumes_to_the_bit_with_a_cold_a_partly_filled_and_a_warm_cache(tmp_path):
    def run(backups, cache, dies_at=0):
        return start("cache_program", tmp_path / "files", tmp_path / backups, cache, dies_at)

    folder = tmp_path / "cache"
    killed = run("backups", folder, 8)
    assert killed.returncode == -signal.SIGKILL, killed.stderr  # in the first epoch, in which the cache is filled
    steps, weights = end(run("backups", folder))
    assert int(steps) < 30
    assert weights == end(run("warm", folder))[1]
    assert weights == end(run("cold", "memory"))[1]
    assert run("killed", "memory", 22).returncode == -signal.SIGKILL
    assert weights == end(run("killed", "memory"))[1]
