"""Workers whose gradients travel by our own sockets train what they train by TensorFlow's collectives, and what one process does."""

import contextlib
import os
import subprocess
import sys

import pytest

from tests.collectives import test_two_level
from tests.helpers import fork_server, tiers, two_hosts
from tests.multiprocess import harness, test_lost_workers, test_shared_memory
from tests.multiprocess.roles import Roles
from tests.multiprocess.test_backup import check_equal, run_uninterrupted
from tests.multiprocess.test_backup import run as run_backup_program
from tfdist.cluster import ClusterSpec, TaskSpec

pytestmark = pytest.mark.timeout(900)
CASES = test_shared_memory.CASES


@pytest.mark.parametrize("hosts", tiers.cases([[[0, 1], [2]], [[0, 2], [1, 3]]], quick=1))
def test_sums_by_host_are_those_of_numpy(tmp_path, hosts):
    test_two_level.check_sums(tmp_path / "told", hosts, "tcp")


@pytest.mark.parametrize("lost", tiers.cases([0, 1, 2, 3], quick=[1]))
def test_a_rank_that_is_killed_ends_all_hosts(tmp_path, lost):
    test_two_level.check_that_all_end(tmp_path / "told", [[0, 2], [1, 3]], "tcp", lost)


@pytest.mark.full
def test_workers_of_several_hosts_train_what_one_process_does(stock, tmp_path, monkeypatch):
    monkeypatch.setenv(harness.HOSTS, "a,a,b")
    found = harness.run("fit_program", "multi_worker_mirrored", tmp_path, *CASES, size=3, transport="tcp")
    test_shared_memory.check_fits(found, stock(*CASES))


@pytest.mark.full
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_lost_worker_ends_those_of_all_hosts(tmp_path, monkeypatch, lost):
    monkeypatch.setenv(harness.TRANSPORT, "tcp")
    monkeypatch.setenv(harness.HOSTS, "a,b,a,b")
    command = fork_server.command("tests.multiprocess.lost_worker_program", str(lost), "kill")
    with Roles(command, tmp_path / "roles", workers=4, ps=0) as roles:
        roles.wait(f"worker:{lost}", 200)
        assert "it happens" in roles.log(f"worker:{lost}")
        others = [f"worker:{rank}" for rank in range(4) if rank != lost]
        assert [roles.wait(task, 110) for task in others] == [1, 1, 1], roles.log(others[0])
        line = "gradients travel by tcp between 2 hosts, and by shared memory within:"
        assert roles.log("worker:0").count(line) == 1, roles.log("worker:0")


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("executions", "all_gather", "all_to_all"), id="each kind of exchange"),
        pytest.param((), id="all", marks=pytest.mark.full),
    ],
)
def test_two_workers_train_what_they_do_by_grpc_to_the_bit(tmp_path, cases):
    found = harness.run("transport_program", "multi_worker_mirrored", tmp_path, *cases, transport="tcp")
    harness.check_trained_alike(found, "tcp")


@pytest.mark.full
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_workers_train_what_one_process_does(stock, tmp_path, size):
    found = harness.run("fit_program", "multi_worker_mirrored", tmp_path, *CASES, size=size, transport="tcp")
    test_shared_memory.check_fits(found, stock(*CASES))


@pytest.mark.full
def test_compressors_exchange_what_they_do_by_grpc(runs):
    how = ("multi_worker_mirrored", "compression_program", "exchanges", "rows", "kinds")
    mine, grpc = (runs(*how, transport=name)[0] for name in ("tcp", "grpc"))
    harness.check_exchanges(mine, grpc)


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("callback", "Workers did different things at once: worker:0 was in fit"),
        ("fit", "A dataset has fewer batches on some workers than on others"),
    ],
)
def test_workers_that_do_different_things_say_so(tmp_path, case, sentence):
    for results in harness.run("mismatched_calls_program", "multi_worker_mirrored", tmp_path, case, transport="tcp"):
        assert results["said"].startswith(sentence), results["said"]


@pytest.mark.full
@pytest.mark.parametrize(("lost", "how"), [(0, "kill"), *((1, how) for how in ("kill", "error", "exit"))])
def test_the_others_end_and_name_it_where_no_launcher_does_so(tmp_path, monkeypatch, lost, how):
    monkeypatch.setenv(harness.TRANSPORT, "tcp")
    test_lost_workers.test_the_others_end_and_name_it(tmp_path, lost, how)


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_say_for_whom_they_wait_and_go_on_with_it(tmp_path, monkeypatch, lost):
    monkeypatch.setenv(harness.TRANSPORT, "tcp")
    test_lost_workers.test_the_others_say_for_whom_they_wait_and_go_on_with_it(tmp_path, lost)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["a,a,a", "a,b,b"])  # in the latter the worker leads a host
def test_one_that_stays_stopped_is_given_up_by_all(tmp_path, monkeypatch, hosts):
    monkeypatch.setenv(harness.TRANSPORT, "tcp")
    monkeypatch.setenv(harness.HOSTS, hosts)
    test_lost_workers.test_one_that_stays_stopped_is_given_up_by_all(tmp_path)


@pytest.mark.full
def test_a_killed_worker_is_restarted_and_the_bits_are_the_same(tmp_path, monkeypatch, once):
    expected = run_uninterrupted(once, "multi_worker_mirrored")
    monkeypatch.setenv(harness.TRANSPORT, "tcp")
    kills = [[1, "step", 12]]
    code, text, results = run_backup_program("multi_worker_mirrored", tmp_path / "killed", max_restarts=1, kills=kills)
    assert code == 0, text
    assert "worker:1 lost" in text and text.count("gradients travel by tcp") == 2, text
    check_equal(results, expected)


@pytest.mark.full
@pytest.mark.skipif(bool(two_hosts.missing()), reason=two_hosts.missing() or "there are namespaces")
def test_workers_of_two_hosts_train_alike(tmp_path):
    spec = ClusterSpec({"worker": [f"{name}:2222" for name in two_hosts.NAMES]})
    with two_hosts.two(tmp_path) as hosts, contextlib.ExitStack() as stack:
        processes = []
        for rank, host in enumerate(hosts):
            environ = os.environ | {"PYTHONPATH": str(harness.ROOT), harness.TRANSPORT: "tcp"}
            environ["TF_CONFIG"] = spec.to_tf_config(TaskSpec("worker", rank))
            words = ["tests.multiprocess.transport_program", "multi_worker_mirrored", str(tmp_path), "executions"]
            process = subprocess.Popen([*host, sys.executable, "-m", *words], cwd=harness.ROOT, env=environ)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        assert [process.wait(300) for process in processes] == [0, 0]
    for rank in range(2):
        results = harness.load(tmp_path, rank)
        assert results["transport"] == "tcp" and "all_reduce" in results["travelled"]
        before, after = results["mine"]["executions"]
        assert harness.difference(before, after) > 1e-3
        assert harness.difference(after, results["tensorflow"]["executions"][1]) == 0
