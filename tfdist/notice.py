"""How a parameter server that has been told to go tells the chief, which alone can save: through the chief's own server."""

from __future__ import annotations

import contextlib
import time

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec

_WITHIN_MS = 5000
_LOOK_EVERY = 0.5  # seconds


def give(cluster: ClusterSpec, task: TaskSpec) -> None:
    """Lets a `Listener` on the chief return True; where the chief is out of reach, does nothing.

    Args:
        cluster: The cluster.
        task: This process's task.
    """
    chief = cluster.address(cluster.chief)
    options = tf.compat.v1.ConfigProto(device_filters=["/job:chief"], operation_timeout_in_ms=_WITHIN_MS)
    # A session of TensorFlow 1 is the one way to use a server without becoming a part of its cluster.
    with tf.Graph().as_default() as graph, tf.device("/job:chief/task:0/device:CPU:0"):
        enqueue = tf.raw_ops.QueueEnqueueV2(handle=_queue(), components=[tf.constant(str(task))])
    with contextlib.suppress(tf.errors.OpError), tf.compat.v1.Session(f"grpc://{chief}", graph, options) as session:
        session.run(enqueue)


class Listener:
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
            return bool(tf.raw_ops.QueueSizeV2(handle=_queue()).numpy())


def _queue() -> tf.Tensor:
    return tf.raw_ops.FIFOQueueV2(component_types=[tf.string], container="tfdist", shared_name="told_to_go")
