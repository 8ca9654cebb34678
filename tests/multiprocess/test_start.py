"""A task that comes to harm between the preflight and TensorFlow's server: the others say so, heed signals, and end in time."""

import contextlib
import io
import os
import pathlib
import re
import signal

import pytest

from tests.helpers import fork_server
from tests.helpers.launched_job import until
from tests.multiprocess.roles import Roles
from tfdist.cluster import local_cluster
from tfdist.launch import Launcher, Options


def program(strategy, lost, how, timeout, backups=""):
    return fork_server.command("tests.multiprocess.start_program", strategy, lost, how, str(timeout), str(backups))


def test_a_peer_that_dies_before_it_connects_is_named_and_waited_for_no_longer_than_allowed(tmp_path):
    with contextlib.ExitStack() as stack:
        runs = [
            (f"worker:{1 - rank}", f"worker:{rank}", stack.enter_context(Roles(command, tmp_path / f"{rank}", 2, 0)))
            for rank in (0, 1)
            for command in [program("multi_worker_mirrored", f"worker:{rank}", "die", 12)]
        ]
        for left, gone, roles in runs:
            assert roles.wait(left, 60) == 1, roles.log(left)
            where = f"for {gone} at {roles.cluster.jobs['worker'][int(gone[-1])]} (connection refused)\n"
            assert f"tfdist: {left}: TensorFlow waits {where}" in roles.log(left)
            assert f"tfdist: {left}: TensorFlow has waited 12 s, and is ended, {where}" in roles.log(left)


@pytest.mark.parametrize(
    ("number", "backups", "code"),
    [(signal.SIGTERM, False, -signal.SIGTERM), (signal.SIGTERM, True, 75), (signal.SIGINT, False, -signal.SIGINT)],
)
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_signal_ends_a_task_while_it_connects(tmp_path, rank, number, backups, code):
    command = program("multi_worker_mirrored", f"worker:{1 - rank}", "die", 60, tmp_path / "b" if backups else "")
    with Roles(command, tmp_path / "roles", 2, 0) as roles:
        left = f"worker:{rank}"
        roles.wait(f"worker:{1 - rank}", 60)
        until(lambda: "heeds SIGTERM" in roles.log(left), 60)  # which TensorFlow had taken for itself, to wait
        roles.processes[left].send_signal(number)
        assert roles.wait(left, 40) == code, roles.log(left)  # or it ends after the 60 s of a start


@pytest.mark.parametrize(
    ("strategy", "lost"),
    [
        ("multi_worker_mirrored", "worker:0"),
        pytest.param("multi_worker_mirrored", "worker:1", marks=pytest.mark.full),
        pytest.param("parameter_server", "chief:0", marks=pytest.mark.full),
        pytest.param("parameter_server", "ps:0", marks=pytest.mark.full),
    ],
)
def test_who_has_stolen_a_port_is_named(tmp_path, strategy, lost):
    command = program(strategy, lost, "steal", 8)
    with Roles(command, tmp_path / "roles", *((2, 0) if strategy == "multi_worker_mirrored" else (1, 1))) as roles:
        job, index = lost.split(":")
        address = roles.cluster.jobs[job][int(index)]
        assert roles.wait(lost, 60) == 1
        (thief,) = re.findall(r"^thief (\d+)$", roles.log(lost), re.MULTILINE)
        said = rf"ClusterError: {lost} cannot listen at {address}: port \d+ is taken by pid {thief} \(.*import.*\)\. End that process, or give"
        assert re.search(said, roles.log(lost)), roles.log(lost)
        others = {str(task) for task in roles.cluster.tasks()} - {lost}
        assert {roles.wait(other, 60) for other in others} == {1}
        # Workers and servers wait for their chief alone.
        assert any(f"{lost} at {address} (" in roles.log(other) for other in others)


def test_after_a_start_nothing_is_left_of_the_watch(tmp_path):
    with Roles(program("multi_worker_mirrored", "", "no", 60), tmp_path / "roles", 2, 0) as roles:
        for task in ("worker:0", "worker:1"):
            assert roles.wait(task, 60) == 0, roles.log(task)
            assert "[2.0, [], true]" in roles.log(task)


def test_a_stolen_port_costs_a_restart(tmp_path):
    output = io.BytesIO()
    command = program("multi_worker_mirrored", "worker:1", "steal once", 30)
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2]), "ROLES": str(tmp_path)}
    given = local_cluster(2)
    launcher = Launcher(
        Options(command, given, tmp_path / "logs", environ, max_restarts=1, fresh_ports=True), output=output
    )
    assert launcher.run() == 0, output.getvalue().decode()
    said = output.getvalue().decode()
    assert re.search(r"worker:1 lost \(exit code 1: .*worker:1 cannot listen at .* is taken by pid", said)
    assert said.count("[2.0, [], true]") == 2
