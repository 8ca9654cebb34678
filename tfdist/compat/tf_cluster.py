"""What tfdist uses of TensorFlow beyond its public interface where several processes work together.

A release may move these names: tests/architecture/test_keras_internals.py says which. Only `tfdist/compat` and that test use
the constants that begin with `TF_`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import errors_impl as errors
from tensorflow.python.ops.collective_ops import all_gather_v2 as all_gather
from tensorflow.python.ops.collective_ops import all_reduce_v2 as all_reduce
from tensorflow.python.ops.collective_ops import all_to_all_v2 as all_to_all
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

__all__ = ["ResourceVariable", "all_gather", "all_reduce", "all_to_all"]


# Collectives

TF_CROSS_DEVICE_OPS = "_cross_device_ops"
TF_LAUNCHERS = "_launchers"


def launchers(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> Sequence[Any]:
    """Returns the objects with which a strategy launches collectives, one for each device of this process."""
    found: Sequence[Any] = getattr(getattr(strategy.extended, TF_CROSS_DEVICE_OPS), TF_LAUNCHERS)
    return found


def device(launcher: Any) -> str:
    """Returns the device of a launcher."""
    return str(launcher._device)


def group(launcher: Any) -> tuple[Any, Any]:
    """Returns (size, key) of the group of devices whose collectives a launcher launches."""
    return launcher._group_size, launcher._group_key


def next_key(launcher: Any) -> Any:
    """Returns the key of a launcher's next collective, another one at each call."""
    return launcher._next_instance_key()


def options(launcher: Any) -> Any:
    """Returns the communication options of a launcher."""
    return launcher._options


def ordering_token(launcher: Any) -> tf.Tensor:
    """Returns the resource on which a launcher's collectives wait for each other."""
    return launcher._get_ordering_token()


def abort_collectives(code: int, message: str) -> None:
    """Makes all collectives of this process fail."""
    eager_context.context().abort_collective_ops(code, message)


# The server and the coordination service

TF_SERVES = "_std_server_started"
TF_CONNECT = "TFE_EnableCollectiveOps"
TF_ADD_FUNCTION, TF_REMOVE_FUNCTION = "TFE_ContextAddFunction", "TFE_ContextRemoveFunction"
TF_LIBRARY = "libtensorflow_cc.so.2"
TF_STATUS = ("TF_NewStatus", "TF_GetCode", "TF_Message", "TF_DeleteStatus")


@contextlib.contextmanager
def releasing_lock() -> Iterator[None]:
    """Has TensorFlow connect the tasks inside without the interpreter's lock, which it would hold until the last one has come.

    No other thread of Python would run meanwhile: none could say who is missing, or hear a signal. TensorFlow's binding does no more
    than `_connect`, but for the lock: ctypes releases it. A system whose TensorFlow hides its C interface keeps the binding.
    """
    if not hasattr(_c_interface(), TF_CONNECT):
        yield
        return
    before = getattr(eager_context.pywrap_tfe, TF_CONNECT)
    setattr(eager_context.pywrap_tfe, TF_CONNECT, _connect)
    try:
        yield
    finally:
        setattr(eager_context.pywrap_tfe, TF_CONNECT, before)


def _connect(context: Any, server_def: bytes) -> None:
    """Starts TensorFlow's server and connects it with the others, as `TFE_EnableCollectiveOps` of its C interface.

    Args:
        context: The capsule of TensorFlow's context.
        server_def: A serialized `ServerDef`.
    """
    _call(TF_CONNECT, context, ctypes.c_char_p(server_def), ctypes.c_size_t(len(server_def)))


def register_functions_without_lock() -> None:
    """Has TensorFlow add functions to the other tasks, and remove them, without the interpreter's lock; it waits until all answer.

    Of the operations on a cluster of parameter servers these are the ones whose binding holds the lock. They are part of the first call
    of a `tf.function`, of `fit` and of checkpoints. A system whose TensorFlow hides its C interface keeps the binding.
    """
    if hasattr(_c_interface(), TF_ADD_FUNCTION):
        setattr(eager_context.pywrap_tfe, TF_ADD_FUNCTION, _add_function)
        setattr(eager_context.pywrap_tfe, TF_REMOVE_FUNCTION, _remove_function)


def _add_function(context: Any, function: Any) -> None:
    # An object of pybind11 is Python's head, and the pointer.
    pointer = ctypes.c_void_p.from_address(id(function) + object.__basicsize__)
    _call(TF_ADD_FUNCTION, context, pointer)


def _remove_function(context: Any, name: str | bytes) -> None:
    _call(TF_REMOVE_FUNCTION, context, ctypes.c_char_p(tf.compat.as_bytes(name)))


@functools.cache
def _c_interface() -> ctypes.CDLL:
    """Returns the library with TensorFlow's C interface: before 2.20 it is not among what the process shows to all."""
    path = os.path.join(tf.sysconfig.get_lib(), TF_LIBRARY)
    found = ctypes.CDLL(None)
    return found if hasattr(found, TF_CONNECT) or not os.path.exists(path) else ctypes.CDLL(path)


def _call(name: str, context: Any, *arguments: Any) -> None:
    """Calls a function of TensorFlow's C interface without the interpreter's lock; raises what its status tells."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    library = _c_interface()
    new, code, message, delete = (getattr(library, each) for each in TF_STATUS)
    new.restype, message.restype = ctypes.c_void_p, ctypes.c_char_p
    code.argtypes = message.argtypes = delete.argtypes = [ctypes.c_void_p]
    status = new()
    try:
        getattr(library, name)(ctypes.c_void_p(pointer(context, None)), *arguments, ctypes.c_void_p(status))
        if number := code(status):
            text = message(status).decode(errors="replace")
            raise errors.exception_type_from_error_code(number)(None, None, text)
    finally:
        delete(status)


def keep_server(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Makes further strategies of this class use the server that runs."""
    setattr(type(strategy.extended), TF_SERVES, True)


def has_coordination_service() -> bool:
    """Whether TensorFlow's coordination service is configured."""
    return eager_context.context().coordination_service is not None


def configure_coordination_service(jobs: Mapping[str, Sequence[str]], heartbeat_timeout_ms: int) -> None:
    """Configures TensorFlow's coordination service.

    Args:
        jobs: The addresses of each job's tasks. Tasks of `chief` and `worker` take part.
        heartbeat_timeout_ms: Milliseconds after which a task that does not answer counts as lost.
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
    """Makes a text known to all tasks of the coordination service."""
    eager_context.context().set_config_key_value(key, value)


def published(key: str, timeout_ms: int) -> str:
    """Returns the text that a task has published, or raises an OpError when none has in time."""
    return str(eager_context.context().get_config_key_value(key, timeout_ms))


# Parameter servers

# The public `schedule` takes no Python functions, in which alone it is known who runs them how often.
TF_CLUSTER = "_cluster"


def coordinator_cluster(strategy: tf.distribute.ParameterServerStrategy) -> Any:
    """Returns the object that schedules Python functions on the workers, of a new `ClusterCoordinator`."""
    return getattr(tf.distribute.coordinator.ClusterCoordinator(strategy), TF_CLUSTER)


def current_device() -> str:
    """Returns the device on which this thread's operations run."""
    return str(eager_context.context().device_name)


def is_worker_failure(error: Exception) -> bool:
    """Whether TensorFlow takes an error for the loss of a worker."""
    return bool(cluster_coordinator._is_worker_failure(error))


def is_server_failure(error: Exception) -> bool:
    """Whether TensorFlow takes an error for the loss of a parameter server."""
    return bool(cluster_coordinator._is_ps_failure(error))
