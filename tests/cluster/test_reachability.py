"""Which task answers at an address, why one does not, and for how long it has not."""

import logging
import socket
import threading

import pytest

from tfdist.cluster import ClusterSpec, TaskSpec, free_ports, greeting, local_cluster, reachability


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_what_listens_is_reached(listening):
    assert reachability.unreachable_reason(listening) == ""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"\x00\x00\x18\x04\x00\x00\x00\x00\x00\x00\x04\x00@\x00\x00", ""),  # TensorFlow's server
        (b"\x00\x00\x00\x04", "another program answers there"),
        (b"tfdist \n", "another program answers there"),
        (b"tfdist 0123456789abcdef worker:1\x1b]0;owned\x07\x1b[2J\n", "another program answers there"),
        (b"SSH-2.0-OpenSSH\r\n", "another program answers there"),
        ("own", ""),
        ("index", "worker:0 answers there, not worker:1"),
        ("cluster", "worker:1 of a cluster with other addresses answers there"),
    ],
)
def test_who_answers_is_known(said, reason):
    with socket.create_server(("127.0.0.1", 0)) as server:
        spec = ClusterSpec({"worker": ["127.0.0.1:1", f"127.0.0.1:{server.getsockname()[1]}"]})
        worker = spec.tasks()[1]
        answers = {
            "own": greeting.encode_greeting(spec, worker),
            "index": greeting.encode_greeting(spec, spec.tasks()[0]),
            "cluster": greeting.encode_greeting(ClusterSpec({"worker": ["h:1", "h:2"]}), worker),
        }
        answer = said if isinstance(said, bytes) else answers[said].encode() + b"\n"

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        expected = greeting.encode_greeting(spec, worker)
        assert reachability.unreachable_reason(spec.address(worker), expected=expected) == reason
        thread.join()


def test_the_reason_is_named():
    (port,) = free_ports(1)
    assert reachability.unreachable_reason(f"127.0.0.1:{port}") == "connection refused"
    assert "name" in reachability.unreachable_reason("no-such-host.invalid:2222")


def test_ipv6_addresses_lose_their_brackets(monkeypatch):
    asked = []

    def connect(address, timeout):
        asked.append(address)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert reachability.unreachable_reason("[::1]:2222") == "no answer"
    assert asked == [("::1", 2222)]


def test_a_peer_whose_answer_takes_long_keeps_the_reason_of_the_round_before():
    (task,) = ClusterSpec({"worker": ["h:1"]}).tasks()
    reasons, asked, over = iter(["connection refused"]), [], threading.Event()

    def why_not(task, seconds):
        asked.append(task)
        return next(reasons, None) or (over.wait(30) and "connection refused")

    probe = reachability.ReachabilityProbe(why_not)
    try:
        assert probe.ask([task], 30) == probe.ask([task], 0) == {task: "connection refused"} and len(asked) == 2
    finally:
        over.set()


def test_seconds_count_from_the_last_answer_but_not_those_in_which_this_process_was_stopped(caplog):
    now = [100.0]
    cluster, worker = local_cluster(2, 1), TaskSpec("worker", 1)
    silent = reachability.SilentTasks(cluster, cluster.chief, lambda: now[0])
    with caplog.at_level(logging.WARNING, "tfdist"):
        for passed, seconds in ((4, 4.0), (4, 8.0), (600, 13.0)):
            now[0] += passed
            silent.note([worker])
            assert silent.seconds == {worker: seconds}
    sentence = f"chief:0 waits for worker:1 at {cluster.address(worker)}: no answer for 13 s."
    assert silent.sentence().startswith(sentence)
    silent.note([])
    assert not silent.seconds and not silent.sentence()
    assert silent.returned == {worker: 13.0}, "an error that comes later may be its consequence"
