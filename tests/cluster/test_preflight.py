"""How a start waits for the other tasks: who listens on a port, how the wait ends, and whose versions differ."""

import errno
import json
import os
import re
import socket
import threading

import pytest

from tfdist.cluster import ClusterSpec, free_ports, greeting, local_cluster, preflight, reachability, task_versions
from tfdist.errors import ClusterError


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def cluster(*addresses):
    return ClusterSpec({"chief": ["c:1"], "worker": addresses})


def test_a_port_that_is_taken_is_named_with_its_owner(listening):
    spec = cluster("h:1", "h:2")
    port = listening.rpartition(":")[2]
    spec = ClusterSpec({"worker": [f"h:{port}"]})
    with (
        pytest.raises(ClusterError, match=rf"port {port} is taken by pid {os.getpid()} "),
        greeting.listening_for_peers(spec, spec.tasks()[0]),
    ):
        pass


def test_afterwards_the_port_is_free():
    (port,) = free_ports(1)
    spec = ClusterSpec({"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]})
    for _ in range(3):
        with greeting.listening_for_peers(spec, spec.tasks()[0]):
            own = spec.tasks()[0]
            assert (
                reachability.unreachable_reason(spec.address(own), expected=greeting.encode_greeting(spec, own)) == ""
            )
        with socket.create_server(("127.0.0.1", port), reuse_port=True):
            pass


@pytest.mark.parametrize(
    ("before", "name", "after"),
    [
        ({}, "no_proxy", "h0,h1"),
        ({"no_proxy": "a,h1"}, "no_proxy", "a,h1,h0"),
        ({"no_grpc_proxy": "a"}, "no_grpc_proxy", "a,h0,h1"),
    ],
)
def test_the_clusters_hosts_are_reached_without_a_proxy(monkeypatch, before, name, after):
    for each in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(each, raising=False)
    for each, value in before.items():
        monkeypatch.setenv(each, value)
    monkeypatch.setenv("no_proxy", before.get("no_proxy", ""))
    preflight.bypass_proxies(ClusterSpec({"worker": ["h0:1", "h1:1"]}))
    assert os.environ[name] == after


def test_a_wait_ends_when_the_last_one_has_come(monkeypatch, capsys):
    spec = cluster("h:1", "h:2")
    answers = {"h:1": iter(["connection refused", ""]), "h:2": iter(["no answer", "no answer", ""])}
    monkeypatch.setattr(reachability, "unreachable_reason", lambda address, *_, **__: next(answers[address]))
    times = iter(range(0, 1000, 6))
    preflight.wait_until_reachable(spec, spec.tasks()[1:], clock=lambda: next(times), sleep=lambda seconds: None)
    assert not [*answers["h:1"], *answers["h:2"]], "those that are there are asked no more"
    assert capsys.readouterr().out == "tfdist: waiting for worker:1 at h:2 (no answer)\n"


def test_a_wait_has_a_limit(monkeypatch, capsys):
    spec = cluster("h:1", "h:2")
    monkeypatch.setattr(
        reachability, "unreachable_reason", lambda address, *_, **__: "no answer" if address == "h:2" else ""
    )
    times = iter(range(0, 1000, 6))
    with pytest.raises(ClusterError, match=r"Waited 60 s for worker:1 at h:2 \(no answer\)\. Is it started"):
        preflight.wait_until_reachable(
            spec, spec.tasks()[1:], 60, clock=lambda: next(times), sleep=lambda seconds: None
        )
    assert capsys.readouterr().out.count("tfdist: waiting for worker:1") == 4


def test_peers_are_asked_at_once(monkeypatch):
    spec = ClusterSpec({"worker": [f"h:{port}" for port in range(1, 21)]})
    together = threading.Barrier(20)

    def unreachable(address, *_, **__):
        together.wait(30)
        return ""

    monkeypatch.setattr(reachability, "unreachable_reason", unreachable)
    preflight.wait_until_reachable(spec, spec.tasks(), 60)


@pytest.mark.parametrize(
    ("addresses", "hint"), [(["localhost:1", "127.0.0.1:2"], True), (["[::1]:1"], True), (["h:1", "h:2"], False)]
)
def test_hosts_that_mean_themselves_are_told_so(addresses, hint):
    spec = ClusterSpec({"worker": addresses})
    with pytest.raises(ClusterError) as caught:
        preflight.wait_until_reachable(spec, spec.tasks(), 0.0)
    assert ("is each host's own address" in str(caught.value)) == hint


def test_a_port_that_cannot_be_had_is_not_called_taken(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    spec = ClusterSpec({"worker": ["h:80"]})
    said = r"port 80 is not available \(permission denied\); give the task another port"
    with pytest.raises(ClusterError, match=said), greeting.listening_for_peers(spec, spec.tasks()[0]):
        pass


def test_a_name_that_is_looked_for_does_not_hold_the_wait(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(reachability, "unreachable_reason", lambda address, *_, **__: over.wait(30) and "")
    spec = cluster("h:1")
    try:
        with pytest.raises(ClusterError, match=r"Waited 1 s for worker:0 at h:1 \(its name is not resolved yet\)"):
            preflight.wait_until_reachable(spec, spec.tasks()[1:], 1.0)
    finally:
        over.set()


@pytest.mark.parametrize(
    ("theirs", "fault", "line"),
    [
        ({"keras": "3.12.0"}, "The version of Keras must be the same on all tasks. Received: 3.", ""),
        (
            {"configuration": "other"},
            "The configuration must be the same on all tasks. Received: mine on this task, other on",
            "",
        ),
        (
            {"devices": "2"},
            "The number of devices with a replica (strategy.devices) must be the same on all tasks. Received: 1 on this task, 2 on",
            "",
        ),
        ({"python": "3.12.1"}, "", "The version of Python must be the same on all tasks. Received: 3."),
        ({"script": "other"}, "", "The script must be the same on all tasks. Received: mine on this task, other on"),
        ({"tensorflow": ""}, "", ""),
        ({}, "", ""),
    ],
)
def test_tasks_that_run_something_else_are_named_before_the_start(monkeypatch, capsys, theirs, fault, line):
    spec = local_cluster(2)
    _, other = spec.tasks()
    mine = {**task_versions.own(), "configuration": "mine", "script": "mine", "devices": "1"}
    monkeypatch.setattr(task_versions, "own", lambda: mine)
    monkeypatch.setattr(task_versions, "encode", lambda: json.dumps({**mine, **theirs}).encode())
    with greeting.listening_for_peers(spec, other):
        if fault:
            with pytest.raises(ClusterError, match=re.escape(fault)) as raised:
                preflight.wait_until_reachable(spec, [other], 60, sleep=lambda seconds: None)
            assert f" on worker:1 at {spec.address(other)}" in str(raised.value)
        else:
            preflight.wait_until_reachable(spec, [other], 60)
    shown = capsys.readouterr().err
    assert (fault or line) in shown and bool(shown) == bool(fault or line)


@pytest.mark.parametrize("said", [b"", b"nonsense", b"[1]", b"[" * 5000])
def test_a_task_that_says_nothing_sound_of_its_versions_is_no_fault(monkeypatch, said):
    spec = local_cluster(2)
    _, other = spec.tasks()
    monkeypatch.setattr(task_versions, "encode", lambda: said)
    with greeting.listening_for_peers(spec, other):
        preflight.wait_until_reachable(spec, [other], 60)
