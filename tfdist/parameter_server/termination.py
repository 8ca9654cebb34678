"""What the tasks of a cluster with parameter servers tell each other, through queues on their TensorFlow servers.

A parameter server that has been told to go tells the chief, which alone can save. The chief, as its process ends, tells the
others with which exit code: whether they are needed again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, reachability
from tfdist.runtime import exit_status

_WITHIN_MS = 5000
_LOOK_EVERY = 0.5  # seconds
_FAREWELL = 5.0  # seconds, after which those that are left are not told
_TOLD_TO_GO, _ENDS = "told_to_go", "ends"


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
