"""Real processes of one host that share memory: sums to the bit, ranks that die or stop, and processes that cannot share any."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers import tiers, unprivileged

PROGRAM = pathlib.Path(__file__).with_name("shared_memory_rank.py")
ROOT = PROGRAM.parents[2]


class Ranks:
    """The processes of a job."""

    def __init__(self, folder, size, scenario, prefixes=None, options=None, only=None, **common):
        self.folder = folder
        self.processes = {}
        (folder / "tmp").mkdir()
        for rank in range(size) if only is None else only:
            own = json.dumps(common | (options or {}).get(rank, {}))
            words = [sys.executable, str(PROGRAM), str(folder), str(rank), str(size), scenario, own]
            self.processes[rank] = subprocess.Popen(
                [*(prefixes or {}).get(rank, []), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"},
            )

    def line(self, rank):
        return self.processes[rank].stdout.readline().strip()

    def outputs(self):
        found = {rank: process.communicate(timeout=120)[0].splitlines() for rank, process in self.processes.items()}
        self.nothing_is_left()
        return found

    def kill(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(60)
            process.stdout.close()

    def nothing_is_left(self):
        """Checks that neither files nor sockets are there once all processes have ended, or one more, if they were killed."""
        if list((self.folder / "tmp").iterdir()):
            assert any(process.returncode == -signal.SIGKILL for process in self.processes.values())
            code = "from tfdist.runtime.folders import temporary\nwith temporary.temporary_folder(): pass"
            environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder / "tmp")}
            subprocess.run([sys.executable, "-c", code], env=environ, timeout=60, check=True)
        # Python itself tries a folder for temporary files by a file, which a killed process leaves.
        trials = re.compile("[a-z0-9_]{8}")
        assert not [path for path in (self.folder / "tmp").iterdir() if not trials.fullmatch(path.name)]
        assert not [name for name in os.listdir("/dev/shm") if name.startswith("tfdist")]
        assert str(self.folder) not in pathlib.Path("/proc/net/unix").read_text()


def until(condition):
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*arguments, folder=tmp_path, **options):
        started.append(Ranks(folder, *arguments, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.kill()


@pytest.mark.parametrize("size", tiers.cases([1, 2, 3, 5], quick=[3]))
def test_sums_and_moves_have_the_bits_of_numpy(start, size):
    assert set(map(tuple, start(size, "arithmetic", close=1).outputs().values())) == {("ready", "done")}


@pytest.mark.parametrize(("size", "seed"), tiers.cases([(2, 1), (3, 2), (5, 3)], quick=1))
def test_a_thousand_calls_in_a_row(start, size, seed):
    assert set(map(tuple, start(size, "many", seed=seed, calls=1000).outputs().values())) == {("ready", "done")}


@pytest.mark.parametrize("slot", tiers.cases([192, 200, 2**16], quick=0))
def test_any_size_of_the_slots(start, slot):
    assert set(map(tuple, start(3, "many", seed=4, calls=100, slot=slot).outputs().values())) == {("ready", "done")}


@pytest.mark.full  # test_transports.py kills a rank, too
def test_a_rank_that_is_killed_is_named_by_all_others(start):
    ranks = start(3, "endless", slot=2**16)
    for rank in range(3):
        assert ranks.line(rank) == "ready"
    time.sleep(0.2)
    ranks.processes[2].kill()
    outputs = ranks.outputs()
    for rank in (0, 1):
        assert outputs[rank][0].startswith("ConnectionError: rank 2 ")
        assert outputs[rank][1].startswith("again: rank 2 ")


@pytest.mark.full
def test_the_child_of_a_killed_rank_hides_nothing(start):
    ranks = start(2, "forks")
    until((ranks.folder / "job-child").exists)
    child = int((ranks.folder / "job-child").read_text())
    try:
        ranks.processes[1].kill()
        assert ranks.processes[0].communicate(timeout=30)[0].splitlines()[1] == "ConnectionError: rank 1 has died"
    finally:
        os.kill(child, signal.SIGKILL)


def stopped(process):
    """Waits until a process has stopped."""
    state = pathlib.Path(f"/proc/{process.pid}/stat")
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")


def test_a_stopped_rank_is_waited_for(start):
    ranks = start(2, "stops")
    assert ranks.line(0) == ranks.line(1) == "ready"
    stopped(ranks.processes[1])
    with pytest.raises(subprocess.TimeoutExpired):
        ranks.processes[0].wait(1)
    ranks.processes[1].send_signal(signal.SIGCONT)
    assert ranks.outputs() == {0: ["done"], 1: ["done"]}


@pytest.mark.full
def test_a_rank_that_is_killed_is_named_while_another_one_is_stopped(start):
    ranks = start(3, "stops")
    for rank in range(3):
        assert ranks.line(rank) == "ready"
    stopped(ranks.processes[1])
    ranks.processes[2].kill()
    assert ranks.line(0) == "ConnectionError: rank 2 has died"


@pytest.mark.full
def test_a_stopped_rank_is_waited_for_up_to_the_limit(start):
    ranks = start(2, "stops", timeout_seconds=2)
    assert ranks.line(0) == ranks.line(1) == "ready"
    assert ranks.line(0) == "TimeoutError: rank 1 did not take part within 2 seconds"
    assert ranks.line(0) == "again: rank 1 did not take part within 2 seconds"
    stopped(ranks.processes[1])  # or it would stop after it was told to go on
    ranks.processes[1].send_signal(signal.SIGCONT)
    assert ranks.outputs()[1][0] == "ConnectionError: rank 1 is lost, as rank 0 reports"


@pytest.mark.full
def test_close_wakes_a_call_of_another_thread(start):
    outputs = start(2, "closes").outputs()
    assert outputs[0][1] == "ConnectionError: the transport was closed"
    assert outputs[1][1] == "ConnectionError: rank 0 has ended"


@pytest.mark.full
@pytest.mark.parametrize("scenario", ["differs", "roots_differ"])
def test_ranks_that_call_different_things_raise(start, scenario):
    outputs = start(2, scenario).outputs()
    errors = sorted(output[1] for output in outputs.values())
    assert errors[-1].startswith("RuntimeError: rank ") and "called another collective" in errors[-1]
    assert errors[0].startswith(("RuntimeError: rank ", "ConnectionError: rank ")), errors


@pytest.mark.full
def test_ranks_that_end_at_once_lose_nothing(start):
    assert set(map(tuple, start(5, "ends").outputs().values())) == {("ready", "done")}


def refused(outputs):
    """Returns why ranks share no memory: the same on all."""
    assert len(set(map(tuple, outputs.values()))) == 1, outputs
    (line,) = outputs[0]
    assert line.startswith("NoTransportError: ")
    return line.removeprefix("NoTransportError: ")


def needs_root(*words):
    if os.geteuid() or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip(f"{' '.join(words)} is not allowed here")


def test_another_user_takes_no_part(start):
    needs_root("true")
    with unprivileged.open_folder() as folder:
        ranks = start(3, "ends", folder=folder, options={2: {"user": unprivileged.NOBODY}})
        assert refused(ranks.outputs()) == "rank 2 has another user than rank 0"


def test_another_network_namespace_counts_as_another_host(start):
    needs_root("unshare", "--net")
    ranks = start(3, "ends", prefixes={1: ["unshare", "--net"]})
    assert refused(ranks.outputs()) == "rank 1 has another host or network namespace than rank 0"


@pytest.mark.full
def test_a_small_dev_shm_or_another_one_does_not_matter(start):
    needs_root("unshare", "--mount")
    own = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=8192 tmpfs /dev/shm && exec "$@"', "sh"]
    ranks = start(2, "arithmetic", prefixes={0: own, 1: own}, slot=2**20)
    assert set(map(tuple, ranks.outputs().values())) == {("ready", "done")}


@pytest.mark.full
def test_too_little_memory_is_an_error_at_the_start(start):
    ranks = start(3, "ends", options={0: {"largest_file": 10_000}})
    assert refused(ranks.outputs()).startswith("rank 0: no memory of 36864 bytes: [Errno 27]")


@pytest.mark.full
def test_a_rank_that_cannot_reach_another_one_is_found_by_trying(start):
    ranks = start(3, "ends", options={1: {"unreachable": 1}}, meeting_seconds=6)
    assert "rank 1 " in refused(ranks.outputs())


@pytest.mark.full
def test_a_rank_that_is_not_there_is_waited_for_up_to_the_limit(start):
    assert "rank 1 is not there" in refused(start(3, "ends", only=[0, 2], meeting_seconds=3).outputs())


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_left_when_all_are_killed_at_any_moment(start, seed):
    draw = random.Random(seed)
    ranks = start(3, "endless", slot=2**16)
    if seed % 2:  # while they connect, else amid calls
        until(lambda: list(ranks.folder.glob("job-*")))
        time.sleep(draw.random() / 30)
    else:
        assert ranks.line(draw.randrange(3)) == "ready"
        time.sleep(draw.random() / 5)
    for process in ranks.processes.values():
        process.kill()
    ranks.outputs()
