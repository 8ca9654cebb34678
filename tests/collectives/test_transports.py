"""The contract of `BufferTransport`, for each row of `CANDIDATES`: sums have the bits of NumPy's fold, and no rank outlives another."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from tests.helpers import fork_server
from tests.multiprocess import harness
from tfdist.collectives.transports import CANDIDATES

SIZE = 3
LIMIT = 30.0  # seconds from a rank's end to that of the others
PROGRAM = "tests.collectives.transport_rank"
MISSING = {
    "mpi": "" if shutil.which("mpirun") else "Open MPI is not installed: make system-deps",
}
# The others' error names the rank; mpirun ends the others and names the rank itself.
LOST = {
    "mpi": r"process rank {lost} .*exited on signal 9",
    "shared_memory": r"lost: ConnectionError: rank {lost} (has died|is lost)",
    "tcp": r"lost: ConnectionError: rank {lost} (has died|is lost)",
}


@contextlib.contextmanager
def started(folder, name):
    """Starts the ranks of a transport, which write to files; ends them."""
    folder.mkdir()
    words = [str(folder), name, str(SIZE)]
    if name == "mpi":
        # Each rank writes to a file, as mpirun's output mixes their lines.
        shell = ["sh", "-c", f'exec "$@" > {folder}/log-$OMPI_COMM_WORLD_RANK 2>&1', "sh"]
        commands = {"mpirun": [*harness.MPIRUN, "-np", str(SIZE), *shell, *fork_server.command(PROGRAM, *words)]}
    else:
        commands = {rank: fork_server.command(PROGRAM, *words, str(rank)) for rank in range(SIZE)}
    with contextlib.ExitStack() as stack:
        processes = {}
        for who, command in commands.items():
            output = stack.enter_context((folder / f"log-{who}").open("wb"))
            processes[who] = subprocess.Popen(
                command, cwd=harness.ROOT, env=harness.mpi_environ(name), stdout=output, stderr=subprocess.STDOUT
            )
            stack.callback(processes[who].wait)
            stack.callback(processes[who].terminate)  # mpirun ends its ranks
        yield processes


def log(folder, who):
    path = folder / f"log-{who}"
    return path.read_text() if path.exists() else ""


def pids(folder, processes):
    """Returns the process of each rank, once all have compared their results with NumPy's."""
    began = time.monotonic()
    while True:
        logs = {rank: log(folder, rank) for rank in range(SIZE)}
        found = [re.search(r"^pid (\d+)$", text, re.MULTILINE) for text in logs.values()]
        if all(found):
            return [int(each[1]) for each in found]
        assert all(process.poll() is None for process in processes.values()), logs
        assert time.monotonic() - began < 120, logs
        time.sleep(0.05)


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("name", CANDIDATES)
def test_sums_are_those_of_numpy_and_the_loss_of_a_rank_ends_the_others_by_name(tmp_path, name, lost):
    if reason := MISSING.get(name):
        pytest.skip(reason)
    if name == "mpi":
        pytest.importorskip("mpi4py")
    folder = tmp_path / "told"
    with started(folder, name) as processes:
        ranks = pids(folder, processes)
        time.sleep(0.5)  # all are in their sums
        os.kill(ranks[lost], signal.SIGKILL)
        killed = time.monotonic()
        left = {who: process for who, process in processes.items() if who != lost}
        for who, process in left.items():
            code = process.wait(LIMIT)
            assert code == 3 or (name == "mpi" and code), log(folder, who)
            assert re.search(LOST[name].format(lost=lost), log(folder, who)), log(folder, who)
        while left_over := [pid for pid in ranks if os.path.exists(f"/proc/{pid}")]:  # mpirun's may end after it
            assert time.monotonic() - killed < LIMIT, left_over
            time.sleep(0.05)
