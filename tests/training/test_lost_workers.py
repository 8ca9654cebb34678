"""Why collectives failed, asked of the systems of the others."""

import socket
import threading
import time

import pytest
import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, free_ports, reachability
from tfdist.collectives.calls import Calls
from tfdist.errors import ClusterError
from tfdist.runtime.report import progress
from tfdist.runtime.report.progress import Loss
from tfdist.training import lost_workers
from tfdist.training.lost_workers import abort_on_lost_workers


@pytest.fixture
def port():
    # Not one that the system may give to an outgoing connection once it is closed.
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as server:
        yield server


def _cluster(port):
    return ClusterSpec({"worker": [f"127.0.0.1:{port.getsockname()[1]}", "127.0.0.1:1"]})


def _error_of_tensorflow():
    return tf.errors.UnavailableError(None, None, "Collective ops is aborted by: Socket closed")


def _error_of_another_transport():
    with pytest.raises(ConnectionError):
        calls(lambda: (_ for _ in ()).throw(ConnectionError("rank 0 has died")))
    return tf.errors.UnknownError(None, None, "ConnectionError: rank 0 has died")


calls = Calls()


@pytest.mark.parametrize("make_error", [_error_of_tensorflow, _error_of_another_transport])
def test_a_worker_whose_port_closes_after_its_connections_is_named(port, make_error):
    error = make_error()

    def end():  # a process that is killed closes one after the other: it is asked once before it has closed its port
        asked, _ = port.accept()
        asked.close()
        port.close()

    ending = threading.Thread(target=end)
    told = r"worker:0 at 127.0.0.1:\d+ \(connection refused\) has ended while worker:1"
    with pytest.raises(ClusterError, match=told), abort_on_lost_workers(_cluster(port), TaskSpec("worker", 1)):
        ending.start()
        raise error
    ending.join()


# As TensorFlow words it: worker:2 has lost worker:1, and then answered this process.
_PASSED_ON = """Collective ops is aborted by: recvmsg:Connection reset by peer
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling /tensorflow.WorkerService/RecvBuf:
Additional GRPC error information from remote target /job:worker/replica:0/task:2 while calling /tensorflow.WorkerService/RecvBuf:"""


@pytest.mark.parametrize(
    ("message", "workers", "named"),
    [
        ("Collective ops is aborted by: Socket closed", 2, 1),
        (_PASSED_ON, 3, 1),
        ("Collective ops is aborted by: Socket closed", 3, None),
        ("the storage of the data is not available", 2, None),
    ],
)
def test_a_connection_that_breaks_between_workers_that_run_is_named(monkeypatch, message, workers, named):
    """A link was away too long; or something in the network has cut the connection."""
    monkeypatch.setattr(reachability, "SETTLED", 0.2)
    monkeypatch.setattr(reachability, "unreachable_tasks", lambda *_, **__: {})
    cluster = ClusterSpec({"worker": [f"host{number}:2222" for number in range(workers)]})
    told = rf"the connection between worker:0 and worker:{named} at host{named}:2222 broke\. .* Start all tasks again"
    error = pytest.raises(ClusterError, match=told) if named else pytest.raises(tf.errors.UnavailableError)
    with error, abort_on_lost_workers(cluster, cluster.chief):
        raise tf.errors.UnavailableError(None, None, message)


def _loss_of_worker_2(monkeypatch, folder, message, ended=()):
    """Returns the error of worker:2, and the loss that it reports to its launcher, after an error of TensorFlow."""
    monkeypatch.setattr(reachability, "SETTLED", 0.2)
    refused = {TaskSpec("worker", number): "connection refused" for number in ended}
    monkeypatch.setattr(
        reachability,
        "unreachable_tasks",
        lambda _, tasks, **__: {task: refused[task] for task in tasks if task in refused},
    )
    if folder:
        monkeypatch.setenv(progress.FOLDER, str(folder))
        monkeypatch.setenv(progress.TASK, "worker-2")
    else:
        monkeypatch.delenv(progress.FOLDER, raising=False)
    cluster = ClusterSpec({"worker": [f"host{number}:2222" for number in range(3)]})
    with pytest.raises(ClusterError) as error, abort_on_lost_workers(cluster, TaskSpec("worker", 2)):
        raise tf.errors.UnavailableError(None, None, message)
    return error.value, progress.read(folder, "worker-2").lost if folder else None


def test_the_task_where_the_error_began_is_lost_and_not_one_that_ended_because_of_it(monkeypatch, tmp_path):
    error, loss = _loss_of_worker_2(monkeypatch, tmp_path, _PASSED_ON.replace("task:2", "task:0"), ended=(0, 1))
    assert str(error).startswith("worker:1 at host1:2222 (connection refused) has ended while worker:2 trained with it")
    assert "worker:0" not in str(error)
    assert loss.task == "worker:1" and f"{loss.cause}. Start all tasks again" in str(error) and not loss.remedy
    assert error.__cause__ is not None, "the log keeps TensorFlow's error"


@pytest.mark.parametrize("supervised", [False, True])
def test_a_reason_that_another_worker_has_sent_names_the_lost_task(monkeypatch, tmp_path, supervised):
    sent = "worker:1 at host1:2222 (connection refused) has ended while worker:0 trained with it; see its log for the cause"
    message = (
        f"Collective ops is aborted by: tfdist: {sent} (lost=worker:1)\nThe error could be from a previous operation."
    )
    error, loss = _loss_of_worker_2(monkeypatch, tmp_path if supervised else None, message)
    assert str(error) == f"{sent}. {lost_workers.REMEDY}"
    assert loss == (Loss("worker:1", sent) if supervised else None)
    assert (error.__cause__ is not None) == supervised, "a terminal shows no chain of TensorFlow's errors"
    assert [path.name for path in tmp_path.iterdir()] == (["worker-2.json"] if supervised else [])


def test_a_task_that_the_others_have_given_up_reports_no_loss(monkeypatch, tmp_path):
    """It was stopped: not another task, but it itself is the cause."""
    message = "Collective ops is aborted by: tfdist: worker:0 waits for worker:2 at host2:2222 (lost=worker:2)"
    assert _loss_of_worker_2(monkeypatch, tmp_path, message)[1] is None


def test_other_errors_are_raised_at_once_as_they_are(port, monkeypatch):
    monkeypatch.setattr(reachability, "SETTLED", 200.0)
    began = time.monotonic()
    kept = pytest.raises(tf.errors.InvalidArgumentError, match="label 7")
    with kept, abort_on_lost_workers(_cluster(port), TaskSpec("worker", 1)):
        raise tf.errors.InvalidArgumentError(None, None, "label 7")
    assert time.monotonic() - began < 100, "what is no lost connection is not asked about again"
