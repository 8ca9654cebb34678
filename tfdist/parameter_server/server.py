"""What a worker or a parameter server does: serves TensorFlow's runtime until the chief has ended.

The tasks of a cluster with parameter servers tell each other, through queues on their TensorFlow servers: a parameter server that has been
told to go tells the chief, which alone can save. The chief, as its process ends, tells the others with which exit code: whether they are
needed again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import NoReturn

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, greeting, preflight, reachability
from tfdist.runtime import exit_status
from tfdist.runtime.log import logger
from tfdist.runtime.preemption import GRACE_SECONDS, Preemption

_POLL_SECONDS, _POLL_SECONDS_IF_PREEMPTED = 1.0, 0.2  # seconds
_MISSES = 3  # a chief that is busy may miss one
_WITHIN_MS = 5000
_LOOK_EVERY = 0.5  # seconds
_FAREWELL = 5.0  # seconds, after which those that are left are not told
_TOLD_TO_GO, _ENDS = "told_to_go", "ends"


def serve(
    cluster: ClusterSpec,
    task: TaskSpec,
    start_timeout: float = preflight.START_TIMEOUT,
    grace_seconds: float = GRACE_SECONDS,
) -> NoReturn:
    """Serves until the chief, once it was there, has gone; then leaves this process with the chief's exit code.

    TensorFlow's servers never end by themselves. SIGINT ends this one, too. On SIGTERM it serves until the chief has saved
    and gone, but for the grace at most. A parameter server, without which the others cannot go on, tells the chief. A chief that
    was killed says nothing: the exit code is then 75 after SIGTERM, and else 1, so that schedulers start this task again, too.

    Args:
        cluster: The cluster, which has a chief.
        task: This process's task.
        start_timeout: Seconds to wait for the chief, and later for one whose host does not answer.
        grace_seconds: How long the process may take to end after SIGTERM.

    Raises:
        ClusterError: The task's port is taken, or the chief has not been there in time.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    options = tf.compat.v1.ConfigProto()
    # A thread waits for each peer: with fewer they might wait for each other.
    options.inter_op_parallelism_threads = max(os.cpu_count() or 1, len(cluster.tasks()) + 1)
    addresses = tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.jobs.items()})
    with greeting.naming_port_owner(cluster, task):
        server = tf.distribute.Server(addresses, task.type, task.index, protocol="grpc", config=options)
    heard = Preemption(grace_seconds)
    heard.listen()
    logger.info(f"{task} serves at {cluster.address(task)}")
    preflight.wait_until_reachable(cluster, [cluster.chief], start_timeout)
    preflight.wait_until_reachable(
        cluster, [cluster.chief], start_timeout, serving=True
    )  # it waits for the others itself
    heard.training = True
    misses, told = 0, False
    silent = reachability.SilentTasks(cluster, task)
    while misses < _MISSES and max(silent.seconds.values(), default=0.0) < start_timeout:
        if heard.requested and not told:
            told = True
            if task.type == "ps":
                announce_preemption(cluster, task)
        time.sleep(_POLL_SECONDS_IF_PREEMPTED if told else _POLL_SECONDS)
        reason = reachability.unreachable_reason(cluster.address(cluster.chief))
        misses = misses + 1 if reason in reachability.ENDED else 0
        silent.note({cluster.chief} if reason and not misses else ())
    code = read_exit_code(cluster, task)
    if code is None:
        code = exit_status.PREEMPTED if heard.requested else 1
        logger.warning(f"{task} ends with exit code {code}, as the chief has gone without a word")
    else:
        logger.info(f"{task} ends with exit code {code}, as the chief has")
    del server
    os._exit(code)  # TensorFlow's server cannot be stopped


def announce_preemption(cluster: ClusterSpec, task: TaskSpec) -> None:
    """Lets a `PreemptionListener` on the chief return True; where the chief is out of reach, does nothing.

    Args:
        cluster: The cluster.
        task: This process's task.
    """
    _put(cluster, cluster.chief, _TOLD_TO_GO, str(task))


class PreemptionListener:
    """Returns, when called on the chief, whether a parameter server has been told to go.

    It looks twice a second at most, as it is called after each step.
    """

    def __init__(self) -> None:
        self._look_at = 0.0

    def __call__(self) -> bool:
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _LOOK_EVERY
        with tf.device("/job:chief/task:0/device:CPU:0"):
            return bool(tf.raw_ops.QueueSizeV2(handle=_queue(_TOLD_TO_GO)).numpy())


def publish_exit_code(cluster: ClusterSpec) -> None:
    """Tells the others, on the chief, with which exit code its process ends."""
    code = exit_status.expected_exit_code()
    ends = time.monotonic() + _FAREWELL
    for task in cluster.tasks():  # one after the other, as an interpreter that ends starts no threads
        if (
            task != cluster.chief
            and time.monotonic() < ends
            and not reachability.unreachable_reason(cluster.address(task))
        ):
            _put(cluster, task, _ENDS, str(code))


def read_exit_code(cluster: ClusterSpec, task: TaskSpec) -> int | None:
    """Returns the exit code of which the chief has told this task, or None where it has not."""
    with contextlib.suppress(tf.errors.OpError), _on(cluster, task) as session:
        handle = _queue(_ENDS)
        if not session.run(tf.raw_ops.QueueSizeV2(handle=handle)):
            return None
        return int(session.run(tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[tf.string]))[0])
    return None


def _put(cluster: ClusterSpec, task: TaskSpec, name: str, text: str) -> None:
    """Puts a text into a queue of a task's; where the task is out of reach, does nothing."""
    with contextlib.suppress(tf.errors.OpError), _on(cluster, task) as session:
        session.run(tf.raw_ops.QueueEnqueueV2(handle=_queue(name), components=[tf.constant(text)]))


@contextlib.contextmanager
def _on(cluster: ClusterSpec, task: TaskSpec) -> Iterator[tf.compat.v1.Session]:
    """Yields a session on a task's server: the one way to use it without becoming a part of its cluster."""
    filters = [f"/job:{task.type}/task:{task.index}"]
    options = tf.compat.v1.ConfigProto(device_filters=filters, operation_timeout_in_ms=_WITHIN_MS)
    with (
        tf.Graph().as_default() as graph,
        tf.device(f"{filters[0]}/device:CPU:0"),
        tf.compat.v1.Session(f"grpc://{cluster.address(task)}", graph, options) as session,
    ):
        yield session


def _queue(name: str) -> tf.Tensor:
    return tf.raw_ops.FIFOQueueV2(component_types=[tf.string], container="tfdist", shared_name=name)
