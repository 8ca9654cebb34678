"""Why collectives failed, asked of the systems of the others."""

import socket
import threading
import time

import pytest
import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.errors import ClusterError
from tfdist.training.lost_workers import abort_on_lost_workers


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def _cluster(port):
    return ClusterSpec({"worker": [f"127.0.0.1:{port.getsockname()[1]}", "127.0.0.1:1"]})


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.UnavailableError(None, None, "Collective ops is aborted by: Socket closed"),
        tf.errors.UnknownError(None, None, "ConnectionError: rank 0 has died\nTraceback (most recent call last):"),
    ],
    ids=["tensorflow", "another transport"],
)
def test_a_worker_whose_port_closes_after_its_connections_is_named(port, error):
    def end():
        time.sleep(1.0)  # a process that is killed closes one after the other
        port.close()

    ending = threading.Thread(target=end)
    told = r"worker:0 at 127.0.0.1:\d+ \(connection refused\) has ended while worker:1"
    with pytest.raises(ClusterError, match=told), abort_on_lost_workers(_cluster(port), TaskSpec("worker", 1)):
        ending.start()
        raise error
    ending.join()


def test_other_errors_are_raised_at_once_as_they_are(port):
    began = time.monotonic()
    kept = pytest.raises(tf.errors.InvalidArgumentError, match="label 7")
    with kept, abort_on_lost_workers(_cluster(port), TaskSpec("worker", 1)):
        raise tf.errors.InvalidArgumentError(None, None, "label 7")
    assert time.monotonic() - began < 4.5  # an address has 3 s to answer
