"""Real processes of one host that stand for several: sums within them, then between, to the bit; and ranks that die."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import pytest

from tests.helpers import tiers
from tests.multiprocess import harness
from tfdist.collectives import two_level

HOSTS = [[[0, 2], [1]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1, 3, 4], [2]]]  # unequal, and not in order


@contextlib.contextmanager
def started(folder, hosts, across, scenario):
    """Starts ranks of `two_level_rank`, and ends them."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.collectives.two_level_rank",
        str(folder),
        json.dumps(hosts),
        across,
        scenario,
    ]
    processes = [
        subprocess.Popen(
            [*command, str(rank)], cwd=harness.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(sum(map(len, hosts)))
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def check_sums(folder, hosts, across):
    """Compares the sums of all ranks with NumPy's."""
    with started(folder, hosts, across, "well") as processes:
        for process in processes:
            assert process.communicate(timeout=200)[0].splitlines() == ["ready", "done"]


def check_that_all_end(folder, hosts, across, lost):
    """Kills a rank amid its sums, and waits for the others."""
    with started(folder, hosts, across, "endless") as processes:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        processes[lost].kill()
        (folder / "job-killed").write_text(str(lost))
        for rank, process in enumerate(processes):
            said = process.communicate(timeout=60)[0]
            assert rank == lost or (process.returncode == 0 and said.startswith("lost: ")), said


@pytest.mark.parametrize(
    ("keys", "hosts", "saves"),
    [
        ("abab", [[0, 2], [1, 3]], True),
        ("baa", [[0], [1, 2]], True),
        ("abc", [[0], [1], [2]], False),
        ("aaa", [[0, 1, 2]], False),
    ],
)
def test_ranks_are_grouped_by_their_hosts(keys, hosts, saves):
    assert two_level.group(keys) == hosts
    assert two_level.saves(hosts) == saves


@pytest.mark.parametrize("hosts", tiers.cases(HOSTS, quick=1))
def test_sums_and_moves_have_the_bits_of_numpy(tmp_path, hosts):
    check_sums(tmp_path / "told", hosts, "memory")


@pytest.mark.parametrize("lost", tiers.cases([0, 1, 2, 3], quick=[1]))
def test_a_rank_that_is_killed_ends_all(tmp_path, lost):
    check_that_all_end(tmp_path / "told", [[0, 2], [1, 3]], "memory", lost)


def test_no_rank_goes_on_where_two_of_a_host_share_no_memory(tmp_path):
    with started(tmp_path / "told", [[0, 1], [2, 3]], "memory", "apart") as processes:
        for process in processes:
            said = process.communicate(timeout=100)[0]
            assert said == "flat: rank 1 has another host or network namespace than rank 0\n"
