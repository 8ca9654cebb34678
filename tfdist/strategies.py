"""`create_strategy`: a name and options to a `tf.distribute` strategy under which stock Keras 3 is right."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute import multi_worker_util
from tensorflow.python.eager import context as eager_context

from tfdist import cures, memory, notice, own_methods, preflight, processors, progress, resolvers, server, startup
from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.config import StrategyConfig
from tfdist.errors import ClusterError, ConfigError, unknown
from tfdist.parameter_servers import ParameterServerStrategy
from tfdist.preemption import GRACE_SECONDS

_FAREWELL_MS = 10_000
_HEARTBEAT_MS = 120_000


def create_strategy(
    strategy: str | StrategyConfig = "mirrored",
    cluster: tuple[ClusterSpec, TaskSpec] | Literal[False] | None = None,
    start_timeout: float = preflight.START_TIMEOUT,
    grace_seconds: float = GRACE_SECONDS,
    **options: Any,
) -> tf.distribute.Strategy:
    """Creates a `tf.distribute` strategy under which stock Keras 3 `model.fit` is right.

    Call it before anything else of TensorFlow: a multi-worker strategy starts the server of this process, and virtual
    CPUs can only be made before TensorFlow has looked at its devices.

    Args:
        strategy: `"one_device"`, `"mirrored"`, `"multi_worker_mirrored"`, `"parameter_server"`, `"central_storage"` or
            `"tpu"`, or a `StrategyConfig`.
        cluster: For `multi_worker_mirrored` and `parameter_server`: the cluster and this process's task in it. None
            means what the environment says (see `resolvers`), and if it says nothing, for the former, a cluster of this
            process alone; so does False, whatever the environment says.
        start_timeout: Seconds to wait for the other tasks.
        grace_seconds: How long workers and servers that are told to go (SIGTERM) wait for the chief to save.
        **options: Fields of `StrategyConfig`, such as `devices=2` (virtual CPUs), `devices="GPU:0,GPU:1"`,
            `implementation="ring"`, `bucket_bytes=4_000_000`, `timeout_seconds=600`.

    Returns:
        The strategy: use its `scope()` to build and compile the model, then call `model.fit` (under `parameter_server`,
        `tfdist.Trainer(...).fit`). Under `parameter_server` the workers' and servers' processes do not return from here:
        they serve the chief, and end when it has, with its exit code.

    Raises:
        ClusterError: A task cannot be reached within `start_timeout`, or this one's port is taken.
        ConfigError: A name or option is unknown or does not fit, the cluster is faulty, TensorFlow was already in use,
            or there is no TPU.
    """
    if isinstance(strategy, str):
        known = {field.name for field in dataclasses.fields(StrategyConfig)} - {"name"}
        if faults := [unknown("option of create_strategy", name, known) for name in options if name not in known]:
            raise ConfigError(faults)
        strategy = StrategyConfig(strategy, **options)
    if faults := list(strategy.faults()):
        raise ConfigError(faults)
    startup.check_versions()
    own_methods.install()
    memory.keep_large_blocks()
    if strategy.virtual_cpus:
        _make_virtual_cpus(strategy.virtual_cpus)
    if cluster is None and strategy.name in ("multi_worker_mirrored", "parameter_server"):
        cluster = resolvers.find_cluster(timeout=start_timeout)
    made = _FACTORIES[strategy.name](strategy, cluster or None, start_timeout, grace_seconds)
    made.kind = strategy.name
    return made


def _check_devices(config: StrategyConfig) -> None:
    """Raises where a device is not there: TensorFlow would take the CPU without a word."""
    here = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()]
    for name in config.device_names:
        short = name.upper().rpartition("DEVICE:")[2].lstrip("/")
        if not name.startswith("/job:") and (short if ":" in short else f"{short}:0") not in here:
            raise ConfigError(f"strategy.devices names {name}, which is not there. This process has {', '.join(here)}.")


def _one_device(config: StrategyConfig, *_: Any) -> tf.distribute.Strategy:
    _check_devices(config)
    default = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    return cures.OneDeviceStrategy((config.device_names or [default])[0])


def _mirrored(config: StrategyConfig, *_: Any) -> tf.distribute.Strategy:
    _check_devices(config)
    # NCCL is TensorFlow's choice wherever there are GPUs. On CPUs it copies through one device, which has no packs.
    operations = {
        "auto": lambda: None,
        "ring": tf.distribute.ReductionToOneDevice,
        "nccl": lambda: tf.distribute.NcclAllReduce(num_packs=1),
    }[config.implementation]()
    return cures.MirroredStrategy(config.device_names or None, operations)


def _central_storage(config: StrategyConfig, *_: Any) -> tf.distribute.Strategy:
    _check_devices(config)
    return cures.CentralStorageStrategy(config.device_names or None)


def _multi_worker_mirrored(
    config: StrategyConfig, cluster: tuple[ClusterSpec, TaskSpec] | None, start_timeout: float, *_: Any
) -> tf.distribute.Strategy:
    if cluster is None and (hint := resolvers.overlooked()):
        print(f"tfdist: training on this host alone, though {hint}.", flush=True)
    resolver = None
    watched: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if cluster is not None:
        spec, task = cluster
        if spec.jobs.get("ps"):
            raise ConfigError("multi_worker_mirrored has no parameter servers: take job 'ps' out of the cluster.")
        if task.type == "evaluator":
            raise ConfigError("An evaluator does not train: use strategy one_device in its process.")
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({job: list(addresses) for job, addresses in spec.jobs.items()}),
            task_type=task.type,
            task_id=task.index,
            rpc_layer="grpc",
        )
        if not startup.serves():  # this process, already, for a strategy before this one
            if startup.started():
                raise startup.too_late("multi_worker_mirrored cannot be created")
            _compute_beside()
            _listen_longer(spec)
            watched = preflight.passed(spec, task, start_timeout)
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=config.timeout_seconds or None,
        implementation=tf.distribute.experimental.CommunicationImplementation[config.implementation.upper()],
    )
    try:
        with watched:
            strategy = cures.MultiWorkerMirroredStrategy(resolver, options)
    except RuntimeError as e:
        if "program startup" not in str(e):
            raise
        raise startup.too_late("multi_worker_mirrored cannot be created") from e
    strategy.bucket_bytes = config.bucket_bytes
    _agree_on_seed(strategy)
    processors.compare(strategy, strategy.num_workers)
    if resolver:
        atexit.unregister(_end_together)  # for a strategy before this one
        atexit.register(_end_together)
    return strategy


def _end_together() -> None:
    """Waits a while for the others before this task ends in success.

    A task is through with a collective once it has what it needs of the others. They may still be receiving from it, and fail
    ("Socket closed") where its process ends.
    """
    if not progress.ends_with():
        with contextlib.suppress(tf.errors.OpError):  # some may have ended long ago
            eager_context.context().wait_at_barrier("tfdist/end", _FAREWELL_MS)


def _parameter_server(
    config: StrategyConfig, cluster: tuple[ClusterSpec, TaskSpec] | None, start_timeout: float, grace_seconds: float
) -> tf.distribute.Strategy:
    if cluster is None:
        raise ConfigError(
            "parameter_server needs a cluster: start its tasks with a scheduler, with --hosts, with TF_CONFIG in each one's "
            "environment, or with python -m tfdist.launch --workers=2 --ps=1 -- python script.py"
        )
    spec, task = cluster
    if faults := list(spec.parameter_server_faults()):
        ranks = " Of a scheduler's ranks, say how many serve: --config.cluster.ps=1, or tfdist.find_cluster(ps=1)."
        raise ConfigError(fault + ranks * (list(spec.jobs) == ["worker"]) for fault in faults)
    if task.type == "evaluator":
        raise ConfigError("An evaluator does not train: use strategy one_device in its process.")
    preflight.pass_by_proxies(spec)
    if task.type != "chief":
        with preflight.at_own_address(spec, task):
            pass
        server.serve(spec, task, start_timeout, grace_seconds)
    with preflight.at_own_address(spec, task):
        # TensorFlow would wait in silence.
        preflight.wait_for(spec, [other for other in spec.tasks() if other != task], start_timeout)
    try:
        with preflight.watched(spec, task, start_timeout):
            made = ParameterServerStrategy(spec, config.placement)
    except tf.errors.UnknownError as e:
        raise ClusterError(
            f"{task} cannot serve at {spec.address(task)}: {e.message.splitlines()[0]}. Is the port taken?"
        ) from e
    atexit.register(notice.tell_end, spec)
    return made


def _tpu(config: StrategyConfig, *_: Any) -> tf.distribute.Strategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=config.devices)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError) as e:
        raise ConfigError(
            f"No TPU was found for strategy.devices={config.devices!r} (a TPU's name or address; empty means this "
            f"host's): {str(e).splitlines()[0]}"
        ) from e
    return cures.TPUStrategy(resolver)


_FACTORIES: dict[str, Callable[..., tf.distribute.Strategy]] = {
    "one_device": _one_device,
    "mirrored": _mirrored,
    "multi_worker_mirrored": _multi_worker_mirrored,
    "parameter_server": _parameter_server,
    "central_storage": _central_storage,
    "tpu": _tpu,
}


def _make_virtual_cpus(count: int) -> None:
    """Splits this process's CPU into `count` virtual devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as e:
        # In use already: fine where it was for the same number.
        if (found := len(tf.config.list_logical_devices("CPU"))) != count:
            raise startup.too_late(f"strategy.devices={count} virtual CPUs cannot be made (there are {found})") from e


def _compute_beside() -> None:
    """Lets operations run beside each other even on one core, unless the user has said how many.

    TensorFlow has a thread for each core, and on one core begins with the latest of those that are ready: gradients that could
    travel are computed last.
    """
    threading = tf.config.threading
    if not threading.get_inter_op_parallelism_threads() and "TF_NUM_INTEROP_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if cores == 1:
            threading.set_inter_op_parallelism_threads(2)


def _listen_longer(cluster: ClusterSpec) -> None:
    """Gives heartbeats a minute to be answered, unless the user has configured TensorFlow's coordination service.

    By TensorFlow's default they have 5 s, and training ends with "Deadline Exceeded" where the answer queues for as long behind
    gradients: as on a link of 20 Mbit/s, or sometimes of 100. The Trainer notices a process that ends within seconds all the same
    (`peers.py`); a host that vanishes, TensorFlow notices after two minutes at most.
    """
    context = eager_context.context()
    if context.coordination_service is None:
        known = tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.jobs.items()})
        context.configure_coordination_service(
            service_type="standalone",
            service_leader=multi_worker_util.coordination_leader(known),
            heartbeat_timeout_in_ms=_HEARTBEAT_MS,
            coordinated_jobs=[
                coordination_config_pb2.CoordinatedJob(name=job, num_tasks=len(addresses))
                for job, addresses in cluster.jobs.items()
                if job in ("chief", "worker")
            ],
        )


def _agree_on_seed(strategy: tf.distribute.Strategy) -> None:
    """Gives every worker the chief's random seed, where the user has set none.

    Each worker takes its share of what it has shuffled itself: unless all shuffle alike, some examples are trained
    on twice in an epoch and others not at all.
    """
    seed = random.SystemRandom().randrange(2**31)
    seeds = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(seed if context.replica_id_in_sync_group == 0 else 0, tf.int64)
    )
    agreed = int(strategy.reduce("SUM", seeds))
    if eager_context.global_seed() is None:
        tf.random.set_seed(agreed)
