"""What can be reached, and how a wait for it ends."""

import socket

import pytest

from tfdist import preflight
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import ClusterError


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def cluster(*addresses):
    return ClusterSpec({"chief": ["c:1"], "worker": addresses})


def test_what_listens_is_reached(listening):
    assert preflight.unreachable(listening) == ""


def test_the_reason_is_named():
    (port,) = free_ports(1)
    assert preflight.unreachable(f"127.0.0.1:{port}") == "connection refused"
    assert "name" in preflight.unreachable("no-such-host.invalid:2222")


def test_ipv6_addresses_lose_their_brackets(monkeypatch):
    asked = []

    def connect(address, timeout):
        asked.append(address)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert preflight.unreachable("[::1]:2222") == "no answer"
    assert asked == [("::1", 2222)]


def test_a_wait_ends_when_the_last_one_has_come(monkeypatch, capsys):
    spec = cluster("h:1", "h:2")
    answers = iter(["connection refused", "no answer", "", "no answer", ""])
    monkeypatch.setattr(preflight, "unreachable", lambda address, expected: next(answers))
    times = iter(range(0, 1000, 6))
    preflight.wait_for(spec, spec.tasks()[1:], clock=lambda: next(times), sleep=lambda seconds: None)
    assert next(answers, None) is None, "those that are there are asked no more"
    assert capsys.readouterr().out == "tfdist: waiting for worker:1 at h:2 (no answer)\n"


def test_a_wait_has_a_limit(monkeypatch, capsys):
    spec = cluster("h:1", "h:2")
    monkeypatch.setattr(preflight, "unreachable", lambda address, expected: "no answer" if address == "h:2" else "")
    times = iter(range(0, 1000, 6))
    with pytest.raises(ClusterError, match=r"Waited 60 s for worker:1 at h:2 \(no answer\)\. Is it started"):
        preflight.wait_for(spec, spec.tasks()[1:], 60, clock=lambda: next(times), sleep=lambda seconds: None)
    assert capsys.readouterr().out.count("tfdist: waiting for worker:1") == 5
