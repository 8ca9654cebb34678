"""`strategy.transport=auto` takes what fits where the workers are, says why, and trains what one process does."""

import re
import shutil

import pytest

from tests.multiprocess import harness
from tests.multiprocess.test_shared_memory import CASES, check_fits

pytestmark = pytest.mark.timeout(600)
HOSTS = "the workers are on 2 hosts"
NO_MEMORY = r"all workers share a host, and shared_memory is not possible: rank 0: no memory of \d+ bytes"

NO_PORTS = HOSTS + r", and tcp is not possible: rank 1 cannot reach rank 0 at [\d.:]+: TimeoutError: timed out"


def check(found, transport, reason, expected):
    for results in found:
        assert results["transport"] == transport, results
        assert re.fullmatch(reason, results["transport_reason"]), results
        assert results["transport_reason"] == found[0]["transport_reason"]
        assert harness.difference(results["weights"], expected[0]["weights"]) < 1e-6
        assert harness.difference(results["weights"], found[0]["weights"]) == 0


@pytest.fixture(scope="module")
def expected(runs):
    """What one process trains."""
    return runs("one_device", "auto_program", "as it is")[0]


@pytest.mark.parametrize(
    ("situation", "size", "transport", "reason"),
    [
        ("as it is", 2, "shared_memory", "all workers share a host"),
        ("apart", 2, "tcp", HOSTS),
        pytest.param("as it is", 3, "shared_memory", "all workers share a host", marks=pytest.mark.full),
        pytest.param("no memory", 2, "tcp", NO_MEMORY, marks=pytest.mark.full),
        pytest.param("no ports", 2, "grpc", NO_PORTS, marks=pytest.mark.full),
        pytest.param("as it is", 1, "grpc", "there is one worker", marks=pytest.mark.full),
    ],
)
def test_the_workers_take_what_fits(tmp_path, expected, situation, size, transport, reason):
    found = harness.run("auto_program", "multi_worker_mirrored", tmp_path, situation, size=size)
    check(found, transport, reason, expected)


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed: make system-deps")
@pytest.mark.parametrize("size", [2, 3])
def test_workers_of_several_hosts_that_mpirun_has_started_take_tcp(tmp_path, expected, size):
    pytest.importorskip("mpi4py")
    found = harness.mpirun("auto_program", tmp_path, "apart", size=size, transport="auto")
    check(found, "tcp", f"the workers are on {size} hosts", expected)


@pytest.mark.full
@pytest.mark.parametrize("cases", [CASES[:5], CASES[5:]])
def test_workers_train_by_grpc_what_one_process_does(stock, tmp_path, cases):
    found = harness.run("fit_program", "multi_worker_mirrored", tmp_path, *cases, transport="grpc")
    check_fits(found, stock(*cases), cases)
