"""Connections to a task that does not answer are shut down from this side."""

import socket

import pytest

from tfdist.parameter_server import watch


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_connections_to_one_address_are_shut_down_and_no_others(family):
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        mapped = "::ffff:127.0.0.1" if family == socket.AF_INET6 else "127.0.0.1"  # as gRPC connects, and as others do
        with socket.socket(family) as cut, socket.socket(family) as kept:
            cut.connect((mapped, one.getsockname()[1]))
            kept.connect((mapped, other.getsockname()[1]))
            cut.settimeout(10)
            assert watch.shut_down_connections(watch.resolve_endpoints(f"localhost:{one.getsockname()[1]}")) == 1
            assert cut.recv(1) == b""
            other.settimeout(10)
            kept.sendall(b"x")
            with other.accept()[0] as accepted:
                assert accepted.recv(1) == b"x"


def test_a_connection_that_is_being_made_is_shut_down():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        sockets = [socket.socket() for _ in range(4)]
        for each in sockets:
            each.setblocking(False)
            each.connect_ex(full.getsockname())  # the last ones get no answer, as from a host that has vanished
        assert watch.shut_down_connections(watch.resolve_endpoints(f"127.0.0.1:{full.getsockname()[1]}")) == 4
        for each in sockets:
            each.close()


def test_an_unknown_name_has_no_addresses():
    assert watch.resolve_endpoints("no.such.host.invalid:1") == set()
