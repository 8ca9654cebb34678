"""The process of a worker or a parameter server: it serves TensorFlow's runtime until the chief has ended.

Tasks send each other two messages through queues on their TensorFlow servers. A parameter server that receives SIGTERM
notifies the chief, which alone can save. The chief publishes its exit code when its process ends, so that the others
know whether they are needed again.
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
from tfdist.runtime import process_end
from tfdist.runtime.log import logger
from tfdist.runtime.process_end import GRACE_SECONDS, Preemption

_POLL_SECONDS, _POLL_SECONDS_IF_PREEMPTED = 1.0, 0.2
_MAX_MISSES = 3  # a chief that is busy may miss one
_PREEMPTION_QUEUE, _EXIT_CODE_QUEUE = "told_to_go", "ends"
_SESSION_TIMEOUT_MS = 5000
_PREEMPTION_POLL_SECONDS = 0.5
_PUBLISH_SECONDS = 5.0  # after which the remaining tasks get no exit code


def serve(
    cluster: ClusterSpec,
    task: TaskSpec,
    start_timeout: float = preflight.START_TIMEOUT,
    grace_seconds: float = GRACE_SECONDS,
) -> NoReturn:
    """Serves until the chief has started and ended; then exits this process with the chief's exit code.

    TensorFlow's servers never end by themselves. SIGINT ends this one, too. On SIGTERM it keeps serving until the chief has saved and exited, at
    most `grace_seconds`. A parameter server, without which the others cannot continue, notifies the chief. A chief that was killed publishes no
    exit code: this task then exits with 75 after SIGTERM, and otherwise with 1, so that schedulers start it again, too. Raises ClusterError where
    the port is taken, or the chief is not there within `start_timeout`.
    """
    signal.signal(signal.SIGINT, lambda *_: process_end.end(128 + signal.SIGINT, flush=False))
    options = tf.compat.v1.ConfigProto()
    # A thread waits for each peer: with fewer they might wait for each other.
    options.inter_op_parallelism_threads = max(os.cpu_count() or 1, len(cluster.tasks()) + 1)
    addresses = tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.jobs.items()})
    with greeting.naming_port_owner(cluster, task):
        server = tf.distribute.Server(addresses, task.type, task.index, protocol="grpc", config=options)
    preemption = Preemption(grace_seconds)
    preemption.listen()
    logger.info(f"{task} serves at {cluster.address(task)}")
    preflight.wait_until_reachable(cluster, [cluster.chief], start_timeout)
    # The chief waits for the other tasks itself.
    preflight.wait_until_reachable(cluster, [cluster.chief], start_timeout, serving=True)
    preemption.training = True
    misses, announced = 0, False
    silent = reachability.SilentTasks(cluster, task)
    while misses < _MAX_MISSES and max(silent.seconds.values(), default=0.0) < start_timeout:
        if preemption.requested and not announced:
            announced = True
            if task.type == "ps":
                announce_preemption(cluster, task)
        time.sleep(_POLL_SECONDS_IF_PREEMPTED if announced else _POLL_SECONDS)
        reason = reachability.unreachable_reason(cluster.address(cluster.chief))
        misses = misses + 1 if reason in reachability.ENDED else 0
        silent.note({cluster.chief} if reason and not misses else ())
    code = read_exit_code(cluster, task)
    if code is None:
        code = process_end.PREEMPTED if preemption.requested else 1
        logger.warning(f"{task} ends with exit code {code}, as the chief has gone without a word")
    else:
        logger.info(f"{task} ends with exit code {code}, as the chief has")
    del server
    process_end.end(code)  # TensorFlow's server cannot be stopped


def announce_preemption(cluster: ClusterSpec, task: TaskSpec) -> None:
    """Lets a `PreemptionListener` on the chief return True; does nothing if the chief cannot be reached."""
    _send(cluster, cluster.chief, _PREEMPTION_QUEUE, str(task))


class PreemptionListener:
    """Returns, when called on the chief, whether a parameter server has received SIGTERM.

    It reads the queue twice a second at most, as it is called after each step.
    """

    def __init__(self) -> None:
        self._look_at = 0.0

    def __call__(self) -> bool:
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + _PREEMPTION_POLL_SECONDS
        with tf.device("/job:chief/task:0/device:CPU:0"):
            return bool(tf.raw_ops.QueueSizeV2(handle=_queue(_PREEMPTION_QUEUE)).numpy())


def publish_exit_code(cluster: ClusterSpec) -> None:
    """Sends the exit code of this process, the chief's, to the other tasks."""
    code = process_end.expected_exit_code()
    ends = time.monotonic() + _PUBLISH_SECONDS
    for task in cluster.tasks():  # one after the other, as an interpreter that ends starts no threads
        if (
            task != cluster.chief
            and time.monotonic() < ends
            and not reachability.unreachable_reason(cluster.address(task))
        ):
            _send(cluster, task, _EXIT_CODE_QUEUE, str(code))


def read_exit_code(cluster: ClusterSpec, task: TaskSpec) -> int | None:
    """Returns the exit code that the chief has sent to this task, or None if it has not."""
    with contextlib.suppress(tf.errors.OpError), _session_on(cluster, task) as session:
        handle = _queue(_EXIT_CODE_QUEUE)
        if not session.run(tf.raw_ops.QueueSizeV2(handle=handle)):
            return None
        return int(session.run(tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[tf.string]))[0])
    return None


def _send(cluster: ClusterSpec, task: TaskSpec, name: str, text: str) -> None:
    """Puts a text into a task's queue; does nothing if the task cannot be reached."""
    with contextlib.suppress(tf.errors.OpError), _session_on(cluster, task) as session:
        session.run(tf.raw_ops.QueueEnqueueV2(handle=_queue(name), components=[tf.constant(text)]))


@contextlib.contextmanager
def _session_on(cluster: ClusterSpec, task: TaskSpec) -> Iterator[tf.compat.v1.Session]:
    """Yields a session on a task's server: the one way to use it without becoming a part of its cluster."""
    filters = [f"/job:{task.type}/task:{task.index}"]
    options = tf.compat.v1.ConfigProto(device_filters=filters, operation_timeout_in_ms=_SESSION_TIMEOUT_MS)
    with (
        tf.Graph().as_default() as graph,
        tf.device(f"{filters[0]}/device:CPU:0"),
        tf.compat.v1.Session(f"grpc://{cluster.address(task)}", graph, options) as session,
    ):
        yield session


def _queue(name: str) -> tf.Tensor:
    return tf.raw_ops.FIFOQueueV2(component_types=[tf.string], container="tfdist", shared_name=name)
