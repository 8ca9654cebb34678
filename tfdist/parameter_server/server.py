"""The process of a worker or parameter server: runs a TensorFlow server until the chief has ended.

Tasks send two kinds of messages, through queues on their TensorFlow servers. A parameter server that receives SIGTERM
notifies the chief, because only the chief can save. The chief sends its exit code to all tasks when it ends; they exit with
the same code, so that a scheduler restarts either all tasks or none.
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
from tfdist.runtime.end import process_end
from tfdist.runtime.end.process_end import GRACE_SECONDS, Preemption
from tfdist.runtime.log import logger
from tfdist.runtime.report import progress, stacks

_POLL_SECONDS = 1.0
_POLL_SECONDS_IF_PREEMPTED = 0.2
_MAX_MISSES = 3  # a busy chief may fail to answer once
_PREEMPTION_QUEUE = "told_to_go"
_EXIT_CODE_QUEUE = "ends"
_SESSION_TIMEOUT_MS = 5000
_PREEMPTION_POLL_SECONDS = 0.5
_PUBLISH_SECONDS = 5.0  # limit for sending the exit code to all tasks


def serve(
    cluster: ClusterSpec,
    task: TaskSpec,
    start_timeout: float = preflight.START_TIMEOUT,
    grace_seconds: float = GRACE_SECONDS,
) -> NoReturn:
    """Serves until the chief has started and ended, then exits this process with the chief's exit code.

    TensorFlow's servers never end by themselves. On SIGTERM this one keeps serving until the chief has saved and exited, at most
    `grace_seconds`; a parameter server also notifies the chief, because the other tasks cannot continue without it. SIGINT ends
    the process at once. A chief that was killed sends no exit code: this process then exits with 75 after SIGTERM and with 1
    otherwise, so that a scheduler restarts it together with the chief. `start_timeout` also limits a later silence of the chief.

    Raises:
        ClusterError: The port is taken, or the chief does not start within `start_timeout`.
    """
    stacks.listen(task.name)
    signal.signal(signal.SIGINT, lambda *_: process_end.end(128 + signal.SIGINT, flush=False))
    options = tf.compat.v1.ConfigProto()
    # A thread blocks for each peer; with fewer threads than peers, two tasks could block each other.
    options.inter_op_parallelism_threads = max(os.cpu_count() or 1, len(cluster.tasks()) + 1)
    addresses = tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.jobs.items()})
    with greeting.naming_port_owner(cluster, task):
        server = tf.distribute.Server(addresses, task.type, task.index, protocol="grpc", config=options)
    preemption = Preemption(grace_seconds)
    preemption.listen()
    logger.info(f"{task} serves at {cluster.address(task)}")
    preflight.wait_until_reachable(cluster, [cluster.chief], start_timeout)
    # So far only the chief's greeting has answered: wait for its TensorFlow server. The chief waits for the other tasks itself.
    preflight.wait_until_reachable(cluster, [cluster.chief], start_timeout, serving=True)
    preemption.training = True
    misses = 0
    notified = False
    silent = reachability.SilentTasks(cluster, task)
    # A refused connection means that the chief has ended; no answer at all, that it is busy or its host is gone.
    while misses < _MAX_MISSES and max(silent.seconds.values(), default=0.0) < start_timeout:
        if preemption.requested and not notified:  # again until it arrives: a chief that is suspended takes no message
            notified = task.type != "ps" or _send(cluster, cluster.chief, _PREEMPTION_QUEUE, str(task))
        time.sleep(_POLL_SECONDS_IF_PREEMPTED if preemption.requested else _POLL_SECONDS)
        reason = reachability.unreachable_reason(cluster.address(cluster.chief))
        has_ended = reason in reachability.ENDED
        misses = misses + 1 if has_ended else 0
        silent.note({cluster.chief} if reason and not has_ended else ())
    code = read_exit_code(cluster, task)
    if code is None:
        code = process_end.PREEMPTED if preemption.requested else 1
        if code == 1:
            address = cluster.address(cluster.chief)
            cause = f"{cluster.chief} at {address} has ended without sending its exit code to {task}; see its log for the cause"
            progress.write(lost=progress.Loss(str(cluster.chief), cause))
        # A supervisor that ends all tasks has reported why.
        if not (preemption.requested and progress.is_supervised()):
            logger.warning(
                f"{task} ends with exit code {code}: the chief has ended without sending its exit code; see its log"
            )
    else:
        logger.info(f"{task} ends with exit code {code}, like the chief")
    del server
    process_end.exit_code = code
    stacks.remove_file()
    process_end.end(code)  # TensorFlow's server cannot be stopped


class PreemptionListener:
    """Checks, on the chief, whether a parameter server has received SIGTERM: call it after each step.

    It reads the queue at most twice a second, so that the check does not slow down steps.
    """

    def __init__(self) -> None:
        self._next_poll = 0.0

    def __call__(self) -> bool:
        if time.monotonic() < self._next_poll:
            return False
        self._next_poll = time.monotonic() + _PREEMPTION_POLL_SECONDS
        with tf.device("/job:chief/task:0/device:CPU:0"):
            return bool(tf.raw_ops.QueueSizeV2(handle=_queue(_PREEMPTION_QUEUE)).numpy())


def publish_exit_code(cluster: ClusterSpec) -> None:
    """Sends the exit code of this process, the chief, to all other tasks that answer."""
    code = process_end.expected_exit_code()
    deadline = time.monotonic() + _PUBLISH_SECONDS
    for task in cluster.tasks():  # one after the other: an interpreter that shuts down starts no threads
        if task == cluster.chief or time.monotonic() > deadline:
            continue
        if not reachability.unreachable_reason(cluster.address(task)):
            _send(cluster, task, _EXIT_CODE_QUEUE, str(code))


def read_exit_code(cluster: ClusterSpec, task: TaskSpec) -> int | None:
    """Returns the exit code that the chief has sent to this task, or None if it has sent none."""
    try:
        with _session_on(cluster, task) as session:
            handle = _queue(_EXIT_CODE_QUEUE)
            if not session.run(tf.raw_ops.QueueSizeV2(handle=handle)):
                return None
            return int(session.run(tf.raw_ops.QueueDequeueV2(handle=handle, component_types=[tf.string]))[0])
    except tf.errors.OpError:
        return None


def _send(cluster: ClusterSpec, task: TaskSpec, name: str, text: str) -> bool:
    """Puts a text into a task's queue; returns whether the task has answered within some seconds."""
    try:
        with _session_on(cluster, task) as session:
            session.run(tf.raw_ops.QueueEnqueueV2(handle=_queue(name), components=[tf.constant(text)]))
    except tf.errors.OpError:
        return False
    return True


@contextlib.contextmanager
def _session_on(cluster: ClusterSpec, task: TaskSpec) -> Iterator[tf.compat.v1.Session]:
    """Yields a session on a task's server: the only way to use a server without joining its cluster."""
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
