"""Private names of TensorFlow for several processes.

A release may move these names: tests/architecture/test_keras_internals.py then fails and names them. Only `tfdist/compat` and that test use
the constants that begin with `TF_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops.collective_ops import all_gather_v2 as all_gather
from tensorflow.python.ops.collective_ops import all_reduce_v2 as all_reduce
from tensorflow.python.ops.collective_ops import all_to_all_v2 as all_to_all
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfdist.aliases import Launcher
from tfdist.runtime.lock_lending import LockLender

__all__ = ["ResourceVariable", "all_gather", "all_reduce", "all_to_all"]


# Collectives

TF_CROSS_DEVICE_OPS = "_cross_device_ops"
TF_HOST_CROSS_DEVICE_OPS = "_host_cross_device_ops"
TF_LAUNCHERS = "_launchers"


def launchers(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> Sequence[Launcher]:
    """Returns the objects with which a strategy launches collectives, one for each device of this process."""
    values: Sequence[Any] = getattr(getattr(strategy.extended, TF_CROSS_DEVICE_OPS), TF_LAUNCHERS)
    return values


def process_launcher(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> Launcher:
    """Returns the object with which a strategy launches collectives of processes, in which the CPU of each takes part."""
    (launcher,) = getattr(getattr(strategy.extended, TF_HOST_CROSS_DEVICE_OPS), TF_LAUNCHERS)
    return launcher


def device(launcher: Launcher) -> str:
    """Returns the device of a launcher."""
    return str(launcher._device)


def group(launcher: Launcher) -> tuple[Any, Any]:
    """Returns (size, key) of the group of devices whose collectives a launcher launches."""
    return launcher._group_size, launcher._group_key


def next_key(launcher: Launcher) -> Any:
    """Returns the key of a launcher's next collective; each call returns another key."""
    return launcher._next_instance_key()


def options(launcher: Launcher) -> Any:
    """Returns the communication options of a launcher."""
    return launcher._options


def ordering_token(launcher: Launcher) -> tf.Tensor:
    """Returns the resource on which a launcher's collectives wait for each other."""
    return launcher._get_ordering_token()


def share_order(
    strategy: tf.distribute.MultiWorkerMirroredStrategy, first: tf.distribute.MultiWorkerMirroredStrategy
) -> None:
    """Makes collectives that a strategy launches on devices wait for those that `first` has launched there, and the reverse."""
    for launcher, other in zip(launchers(strategy), launchers(first), strict=True):
        launcher._ordering_token = other._ordering_token


def abort_collectives(code: int, message: str) -> None:
    """Makes all collectives of this process fail."""
    eager_context.context().abort_collective_ops(code, message)


# The server and the coordination service

TF_SERVES = "_std_server_started"
# The functions of TensorFlow's Python binding that hold the interpreter's lock while they wait for other tasks: they connect a worker,
# and add or remove functions on a cluster of parameter servers, as the first call of a `tf.function` does.
TF_WAITING = ("TFE_EnableCollectiveOps", "TFE_ContextAddFunction", "TFE_ContextRemoveFunction")


def lock_lender() -> LockLender:
    """Returns a context in which other threads run while TensorFlow connects tasks or registers functions."""
    return LockLender(eager_context.pywrap_tfe, TF_WAITING)


def keep_server(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Makes further strategies of this class use the running server."""
    setattr(type(strategy.extended), TF_SERVES, True)


def has_coordination_service() -> bool:
    """Returns whether TensorFlow's coordination service is configured."""
    return eager_context.context().coordination_service is not None


def configure_coordination_service(jobs: Mapping[str, Sequence[str]], heartbeat_timeout_ms: int) -> None:
    """Configures TensorFlow's coordination service, in which the tasks of the jobs `chief` and `worker` take part.

    A task that does not answer for `heartbeat_timeout_ms` counts as lost.
    """
    spec = tf.train.ClusterSpec({job: list(addresses) for job, addresses in jobs.items()})
    eager_context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(spec),
        heartbeat_timeout_in_ms=heartbeat_timeout_ms,
        coordinated_jobs=[
            eager_context.coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(addresses))
            for job, addresses in jobs.items()
            if job in ("chief", "worker")
        ],
    )


def wait_at_barrier(name: str, timeout_ms: int) -> None:
    """Waits until all tasks of the coordination service wait at the same barrier."""
    eager_context.context().wait_at_barrier(name, timeout_ms)


def publish(key: str, value: str) -> None:
    """Publishes a text, which must not be empty, to all tasks of the coordination service."""
    eager_context.context().set_config_key_value(key, value)


def replace(key: str, value: str) -> None:
    """Publishes a text in place of the one that a task has published under `key`."""
    eager_context.context().delete_config_key_value(key)
    publish(key, value)


def try_publish(key: str, value: str) -> bool:
    """Publishes a text; returns False if a task has published one under `key` before, or the chief, which holds the texts, has ended."""
    try:
        publish(key, value)
    except tf.errors.OpError:
        return False
    return True


def published(key: str, seconds: float) -> str:
    """Returns the text that a task has published under `key`. Raises an OpError if no task publishes it within `seconds`."""
    return str(eager_context.context().get_config_key_value(key, max(1, int(1000 * seconds))))


def find_published(key: str, seconds: float) -> str:
    """Returns the text that a task has published under `key`; empty if no task publishes it within `seconds`, or the chief has ended."""
    try:
        return published(key, seconds)
    except tf.errors.OpError:
        return ""


# Parameter servers

# The public `schedule` takes only TensorFlow functions. A Python function knows its worker and counts its calls.
TF_CLUSTER = "_cluster"


def coordinator_cluster(strategy: tf.distribute.ParameterServerStrategy) -> Any:
    """Returns the object that schedules Python functions on the workers, of a new `ClusterCoordinator`."""
    return getattr(tf.distribute.coordinator.ClusterCoordinator(strategy), TF_CLUSTER)


def current_device() -> str:
    """Returns the device on which this thread's operations run."""
    return str(eager_context.context().device_name)


def is_worker_failure(error: Exception) -> bool:
    """Returns whether TensorFlow takes an error for the loss of a worker."""
    return bool(cluster_coordinator._is_worker_failure(error))


def is_server_failure(error: Exception) -> bool:
    """Returns whether TensorFlow takes an error for the loss of a parameter server."""
    return bool(cluster_coordinator._is_ps_failure(error))
