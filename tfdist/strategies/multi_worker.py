"""The strategy for several workers, each with a copy of the variables."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.cluster import ClusterSpec, TaskSpec, connection_timeout, preflight, task_versions
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.spec import ClusterTask
from tfdist.collectives import finished, hardware, transport_choice
from tfdist.collectives.communicator import cross_process_communicator
from tfdist.compat import call_stack, keras_internals, tf_cluster, tf_internals, tf_strategies
from tfdist.config import StrategyConfig, relations
from tfdist.errors import ConfigError
from tfdist.runtime.end import hooks, process_end
from tfdist.runtime.log import logger
from tfdist.strategies import startup
from tfdist.strategies.base import KerasStrategy, UniqueCollectiveKeys

# The dtypes that TensorFlow's CollectiveBcastSend supports.
_BROADCAST = (tf.bool, tf.float32, tf.float16, tf.float64, tf.int32, tf.int64)
# TensorFlow's error when workers broadcast different variables at the same time.
_SHAPES = re.compile(
    r"Shape mismatch in the collective .* expected shape (\[.*?\]) but another .* expected shape (\[.*?\])"
)
_EXIT_BARRIER_MS = 10_000
# Shorter during training: other tasks may wait for this one in a step, and must soon notice that it has ended.
_EXIT_BARRIER_IN_TRAINING_MS = 3_000
_HEARTBEAT_MS = 180_000


class MultiWorkerMirroredStrategy(UniqueCollectiveKeys, KerasStrategy, tf_strategies.MultiWorkerMirroredStrategy):
    """A strategy for the devices of several workers, each with a copy of the variables."""

    transport = "grpc"
    transport_reason = "there is one worker"

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        devices: Sequence[str] = (),
        members: Sequence[int] | None = None,
    ):
        first_member = members[0] if members else 0
        super().__init__(cluster_resolver, communication_options, devices, members, first_member=first_member)
        if not hardware.on_gpus(self):  # NCCL adds in its own order
            tf_strategies.sum_by(self, cross_process_communicator(self).all_reduce)
        if cluster_resolver is not None:
            # A second strategy would restart the server while the other workers' collectives are still in flight.
            tf_cluster.keep_server(self)

    @property
    def num_workers(self) -> int:
        """The number of workers, this one included."""
        return self.num_replicas_in_sync // len(self.extended.worker_devices)

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        if self.mesh:
            kwargs["initial_value"] = self.mesh.initial_value(kwargs)
        dtype = tf.as_dtype(kwargs.get("dtype") or getattr(kwargs.get("initial_value"), "dtype", None) or tf.float32)
        if self.num_workers == 1:
            return super()._create_variable(next_creator, **kwargs)
        cannot = "multi_worker_mirrored cannot broadcast a variable of"
        if dtype not in _BROADCAST:
            remedy = "Train the model unquantized and save it; load and quantize it in one process, or under mirrored, to predict with it."
            if dtype.is_floating:
                remedy = "For 16-bit computation use mixed_bfloat16."
            raise ConfigError(
                f"{cannot} {dtype.name} ({kwargs.get('name')}) to the workers; "
                f"it can: {', '.join(known.name for known in _BROADCAST)}. {remedy}"
            )
        initial_value: Any = kwargs.get("initial_value")

        def checked(value: Structure) -> Structure:
            if tf.TensorShape(np.shape(value)).num_elements() == 0:  # TensorFlow would crash (SIGSEGV)
                raise ConfigError(f"{cannot} size 0 ({kwargs.get('name')}) to the workers; leave it out.")
            return value

        if not callable(initial_value):
            checked(initial_value)
        elif not isinstance(initial_value, tf_internals.CheckpointInitialValueCallable):
            kwargs["initial_value"] = lambda: checked(initial_value())
        try:
            variable = super()._create_variable(next_creator, **kwargs)
        except tf.errors.InvalidArgumentError as e:
            shapes = _SHAPES.search(e.message)
            if shapes is None:
                raise
            path = getattr(call_stack.created_variable(), "path", None) or kwargs.get("name")
            raise ConfigError(
                f"All workers must build the same model. Received: variable {path}, of shapes {shapes[1]} and {shapes[2]} on two workers. "
                "Start all with the same code and the same arguments."
            ) from e
        if kwargs.get("name") == keras_internals.OPTIMIZER_SCALARS[1] and not callable(initial_value):
            # All workers now have the chief's value. `training/program_likeness.py` reports a worker that passed another value.
            variable.given_and_broadcast = float(initial_value), float(variable.numpy())
        return variable


def multi_worker_mirrored(
    config: StrategyConfig, cluster: ClusterTask | None, start_timeout: float, *_: Any
) -> tf.distribute.Strategy:
    """Connects the workers of a cluster, and returns a strategy with a copy of the variables on each device of each worker.

    The first call starts TensorFlow's server in this process, after all tasks have reached the barrier.

    Without a cluster it trains on this host alone.

    Raises:
        ClusterError: A task cannot be reached in time, this task's port is taken, or tasks run different versions.
        ConfigError: The cluster has parameter servers, this task is an evaluator, TensorFlow was already in use, or these
            workers cannot use the transport.
    """
    hint = discovery.misconfiguration_hint()
    if cluster is None and hint:
        logger.warning(f"training on this host alone, though {hint}.")
    startup.check_devices(config)
    resolver = None
    watched: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if cluster is not None:
        spec, task = cluster
        if spec.jobs.get("ps"):
            raise ConfigError(
                "multi_worker_mirrored has no parameter servers: take job 'ps' out of the cluster, or give the Trainer "
                'the strategy "parameter_server".'
            )
        if task.type == "evaluator":
            raise ConfigError("An evaluator does not train: use strategy one_device in its process.")
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({job: list(addresses) for job, addresses in spec.jobs.items()}),
            task_type=task.type,
            task_id=task.index,
            rpc_layer="grpc",
        )
        connection_timeout.keep_connections(spec)
        if not tf_internals.is_server_running():  # an earlier strategy may have started the server
            if tf_internals.is_started():
                raise startup.already_started_error("multi_worker_mirrored cannot be created")
            # TensorFlow reads both settings when it starts.
            _allow_overlap_on_one_core()
            _extend_heartbeat_timeout(spec)
            task_versions.devices = str(len(config.device_names or tf.config.list_physical_devices("GPU")) or 1)
            watched = preflight.startup_barrier(spec, task, start_timeout)
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=config.timeout_seconds or None,
        implementation=tf.distribute.experimental.CommunicationImplementation[
            {"grpc": "RING", "nccl": "NCCL"}.get(config.transport, "AUTO")
        ],
    )
    try:
        with tf_cluster.lock_lender(), watched:
            strategy = MultiWorkerMirroredStrategy(resolver, options, config.device_names)
    except RuntimeError as e:
        if "program startup" not in str(e):
            raise
        raise startup.already_started_error("multi_worker_mirrored cannot be created") from e
    devices = strategy.extended.worker_devices
    if len(devices) > 1:
        relations.check(
            {**config.asked(), "several_devices": f"several devices ({', '.join(devices)})"}, "several_devices"
        )
    strategy.cluster_task = cluster
    _broadcast_seed(strategy)
    strategy.unlike_processors = hardware.unlike_processors(strategy, strategy.num_workers)
    if cluster is not None:
        workers = spec.training_tasks()
        choice = transport_choice.choose(
            strategy,
            list(map(str, workers)),
            list(map(spec.address, workers)),
            workers.index(task),
            config.transport,
            config.timeout_seconds or 0.0,
        )
        strategy.communicator = choice.communicator
        strategy.transport = choice.name
        strategy.transport_reason = choice.reason
    if resolver:
        hooks.at_end(hooks.Stage.PEERS, _exit_barrier, task)
    return strategy


def _exit_barrier(task: TaskSpec) -> None:
    """Waits a limited time for the other tasks before this task exits successfully.

    A task returns from a collective once it has received its data. Its peers may still be reading from it, and would
    fail ("Socket closed") when its process exits. The peers can also read that this task has finished.
    """
    if process_end.expected_exit_code():
        return
    limit = _EXIT_BARRIER_IN_TRAINING_MS
    if not process_end.amid_training:
        finished.publish(task)
        limit = _EXIT_BARRIER_MS
    with contextlib.suppress(tf.errors.OpError):  # other tasks may have exited long ago
        tf_cluster.wait_at_barrier("tfdist/end", limit)


def _allow_overlap_on_one_core() -> None:
    """Lets operations run concurrently even on one core, unless the user has set the number of threads.

    TensorFlow has one thread per core. With one thread it first runs the operation that became ready last, so
    gradients are sent too late.
    """
    threading = tf.config.threading
    if not threading.get_inter_op_parallelism_threads() and "TF_NUM_INTEROP_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if cores == 1:
            threading.set_inter_op_parallelism_threads(2)


def _extend_heartbeat_timeout(cluster: ClusterSpec) -> None:
    """Allows heartbeats 90 s for an answer, unless the user has configured TensorFlow's coordination service.

    A heartbeat that is sent when a link goes down must arrive in time if the link returns within a minute. TensorFlow's default is 5 s.
    Training would end with "Deadline Exceeded" if the answer queues behind gradients for longer, as on a link of 20 Mbit/s, or sometimes
    of 100 Mbit/s. The Trainer still notices within seconds that a process has ended (`training/lost_workers.py`), and after a minute
    that a host has vanished.
    """
    if not tf_cluster.has_coordination_service():
        tf_cluster.configure_coordination_service(cluster.jobs, _HEARTBEAT_MS)


def _broadcast_seed(strategy: tf.distribute.Strategy) -> None:
    """Sets the chief's random seed on every worker, unless the user has set a seed.

    Each worker shuffles the data itself and takes its share. With different shuffles, an epoch would contain
    some examples twice and others never.
    """
    seed = random.SystemRandom().randrange(2**31)
    seeds = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(seed if context.replica_id_in_sync_group == 0 else 0, tf.int64)
    )
    agreed = int(strategy.reduce("SUM", seeds))
    if tf_internals.global_seed() is None:
        tf.random.set_seed(agreed)
