"""Connections of the cluster's tasks keep for longer than gRPC lets them."""

import socket

import pytest

from tfdist.cluster import connection_timeout

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone has the option")


def test_both_ends_keep_what_one_end_has_the_port_of_a_task():
    def timeout(connection):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        pairs = [(socket.create_connection(each.getsockname()), each.accept()[0]) for each in (server, other)]
        for _, accepted in pairs:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)  # as gRPC does
        assert connection_timeout.extend_timeouts(frozenset([server.getsockname()[1]])) == 2
        assert [timeout(end) for end in pairs[0]] == [180_000, 180_000]
        assert [timeout(end) for end in pairs[1]] == [0, 20_000]
        for end in (*pairs[0], *pairs[1]):
            end.close()
