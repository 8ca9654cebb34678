"""A link that is down for a while, and comes back: tasks go on, and train what they train without an outage."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.helpers import tiers, two_hosts
from tests.multiprocess import harness
from tests.multiprocess.roles import RolesOnTwoHosts
from tests.multiprocess.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(two_hosts.missing()), reason=two_hosts.missing() or "there are namespaces"),
]
PROGRAM = [sys.executable, "-m", "tests.multiprocess.outage_program"]
WORKERS = ["worker:0", "worker:1"]
# gRPC by itself closes a connection after 20 s.
QUICK, FULL = ("silent", 25), ("silent", 30)
OUTAGES = [
    QUICK,
    FULL,
    ("silent", 12),
    ("silent", 20),
    ("silent", 50),
    *(("unplugged", seconds) for seconds in (12, 20, 30, 50)),
]
SLOW = OUTAGES[2:]


@pytest.fixture
def hosts():
    with two_hosts.joined() as found:
        yield found


def roles_on(hosts, folder, away, strategy, transport="", ps=0):
    (folder / "told").mkdir()
    command = [*PROGRAM, strategy, transport, str(folder / "told")]
    return RolesOnTwoHosts(command, folder / "roles", two_hosts.commands(hosts, folder), away, ps=ps)


def interrupt(hosts, told, task, how, seconds):
    wait_until((told / f"{task} trains").exists, 150)
    with two_hosts.outage(hosts, how):
        time.sleep(seconds)


def ends(text):
    return set(re.findall(r"worker:\d ends with (\w+)", text))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns the weights that two workers end with."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with (
        two_hosts.joined() as found,
        roles_on(found, folder, "worker:1", "multi_worker_mirrored", "grpc") as roles,
    ):
        assert [roles.wait(task, 150) for task in WORKERS] == [0, 0], roles.log("worker:0")
        (end,) = {end for task in WORKERS for end in ends(roles.log(task))}
        return {end}


@pytest.mark.parametrize("transport", ["grpc", pytest.param("tcp", marks=pytest.mark.full)])
@pytest.mark.parametrize(("how", "seconds"), tiers.cases(OUTAGES, quick=0, slow=SLOW))
def test_workers_go_on_after_an_outage(hosts, tmp_path, undisturbed, how, seconds, transport):
    with roles_on(hosts, tmp_path, "worker:1", "multi_worker_mirrored", transport) as roles:
        interrupt(hosts, tmp_path / "told", "worker:0", how, seconds)
        assert [roles.wait(task, 200) for task in WORKERS] == [0, 0], roles.log("worker:0") + roles.log("worker:1")
        assert ends(roles.log("worker:0")) == ends(roles.log("worker:1")) == undisturbed
        assert "worker:0 waits for worker:1 at" in roles.log("worker:0")


@pytest.mark.parametrize(("how", "seconds"), tiers.cases(OUTAGES[1:], slow=SLOW))
@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed: make system-deps")
def test_workers_whose_gradients_travel_by_mpi_go_on_after_an_outage(hosts, tmp_path, undisturbed, how, seconds):
    pytest.importorskip("mpi4py")
    on, log = two_hosts.commands(hosts, tmp_path), tmp_path / "log"
    environ = harness.mpi_environ("mpi", TFDIST_RENDEZVOUS=str(tmp_path / "rendezvous"))
    passed = [word for name in ("TFDIST_RENDEZVOUS", "PYTHONPATH", "PATH") for word in ("-x", name)]
    command = [*on[0], *harness.MPIRUN, *two_hosts.mpirun_options(on, tmp_path), *passed, "-np", "2"]
    with log.open("wb") as out:
        job = subprocess.Popen(
            [*command, *PROGRAM, "multi_worker_mirrored", "mpi", str(tmp_path)],
            env=environ,
            cwd=harness.ROOT,
            stdout=out,
            stderr=out,
        )
    try:
        interrupt(hosts, tmp_path, "worker:0", how, seconds)
        assert job.wait(200) == 0, log.read_text()
    finally:
        job.terminate()
        job.wait()
    assert ends(log.read_text()) == undisturbed, log.read_text()
    assert "worker:0 waits for worker:1 at" in log.read_text()


@pytest.mark.parametrize("away", ["worker:1", "ps:0"])
@pytest.mark.parametrize(("how", "seconds"), tiers.cases(OUTAGES[1:], slow=SLOW))
def test_parameter_servers_go_on_after_an_outage(hosts, tmp_path, how, seconds, away):
    with roles_on(hosts, tmp_path, away, "parameter_server", ps=1) as roles:
        interrupt(hosts, tmp_path / "told", "chief:0", how, seconds)
        if f"{away} is lost" in roles.log("chief:0"):
            wait_until(lambda: f"{away} is back" in roles.log("chief:0"), 150)
        (tmp_path / "told" / "over").touch()
        codes = {str(task): roles.wait(str(task), 150) for task in roles.cluster.tasks()}
        assert set(codes.values()) == {0}, roles.log("chief:0")
        assert f"chief:0 waits for {away}" in roles.log("chief:0")


@pytest.mark.slow
def test_launchers_on_both_hosts_start_again_after_an_outage_that_is_too_long(hosts, tmp_path, undisturbed):
    command = [sys.executable, "-m", "tfdist.launch", f"--hosts={','.join(two_hosts.NAMES)}", "--max_restarts=3", "--"]
    command += [*PROGRAM, "multi_worker_mirrored", "grpc", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(harness.ROOT)}
    logs = [tmp_path / f"{name}.log" for name in two_hosts.NAMES]
    with contextlib.ExitStack() as stack:
        jobs = []
        for log, on in zip(logs, two_hosts.commands(hosts, tmp_path), strict=True):
            out = stack.enter_context(log.open("wb"))
            jobs.append(subprocess.Popen([*on, *command], env=environ, cwd=tmp_path, stdout=out, stderr=out))
            stack.callback(jobs[-1].wait)
            stack.callback(jobs[-1].terminate)
        interrupt(hosts, tmp_path, "worker:0", "silent", 80)
        assert [job.wait(200) for job in jobs] == [0, 0], logs[0].read_text() + logs[1].read_text()
    # Only the chief's host has the backup's folder at hand.
    sources = ("from step", "from the chief's last backup")
    for log, other, source in zip(logs, WORKERS[::-1], sources, strict=True):
        text = log.read_text()
        assert re.search(rf"ClusterError: worker:\d waits for {other} at \S+: no answer for 6\d s", text), text
        assert f"restart 1/3 {source}" in text, text
        assert ends(text) == undisturbed, text
