"""The creation of a `tf.distribute` strategy, under which stock Keras 3 computes correct results, from a name and options."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, preflight
from tfdist.cluster.resolvers import discovery
from tfdist.cluster.spec import check_member
from tfdist.compat import tf_internals
from tfdist.config import StrategyConfig, registry, validation
from tfdist.config.constraints import MOST_SECONDS
from tfdist.engine import Engine
from tfdist.errors import ConfigError, format_value, unknown_name_message
from tfdist.runtime import allocator
from tfdist.runtime.end.process_end import GRACE_SECONDS
from tfdist.runtime.report import progress
from tfdist.strategies import model_methods, startup
from tfdist.strategies.base import KerasStrategy
from tfdist.strategies.single_process import make_virtual_cpus
from tfdist.strategy import Strategy
from tfdist.verify import settings as verify_settings


def make_engine(strategy: Strategy, compressor: Any = None) -> Engine:
    """Returns the engine of a strategy.

    Raises:
        ConfigError: The strategy's traits name an unknown engine.
    """
    engine: Engine = registry.resolve("engine", strategy.traits.engine, {})(strategy, compressor)
    return engine


def create_strategy(
    strategy: str | StrategyConfig = "mirrored",
    cluster: tuple[ClusterSpec, TaskSpec] | Literal[False] | None = None,
    start_timeout: float = preflight.START_TIMEOUT,
    grace_seconds: float = GRACE_SECONDS,
    **options: Any,
) -> tf.distribute.Strategy:
    """Creates a `tf.distribute` strategy under which stock Keras 3 `model.fit` computes correct results.

    Call it before any other use of TensorFlow. A multi-worker strategy starts the server of this process, and virtual
    CPUs can only be created before TensorFlow has initialized its devices.

    Args:
        strategy: `"one_device"`, `"mirrored"`, `"multi_worker_mirrored"`, `"parameter_server"`, `"central_storage"` or
            `"tpu"`, your own factory as `"package.module:function"`, or a `StrategyConfig`.
        cluster: For `multi_worker_mirrored` and `parameter_server`: the cluster and this process's task in it. None
            means the cluster of the environment (see `cluster.resolvers`). If there is none, `multi_worker_mirrored` trains
            in this process alone. False ignores the environment.
        start_timeout: Seconds to wait for the other tasks.
        grace_seconds: Seconds for which workers and servers, after SIGTERM, wait for the chief to save.
        **options: Fields of `StrategyConfig`, such as `devices=2` (virtual CPUs), `devices="GPU:0,GPU:1"`,
            `replicas=4` (of all workers together), `transport="grpc"`, `bucket_bytes=4_000_000`, `gather_loss_bytes=1_000_000`,
            `timeout_seconds=600`.

    Returns:
        The strategy: use its `scope()` to build and compile the model, then call `model.fit` (under `parameter_server`,
        `tfdist.Trainer(...).fit`). Under `parameter_server` the workers' and servers' processes do not return from this
        call: they serve the chief, and exit when it exits, with its exit code.

    Raises:
        ClusterError: A task cannot be reached within `start_timeout`, or this task's port is taken.
        ConfigError: A name or option is unknown or does not fit, the cluster is invalid, TensorFlow was already in use,
            or there is no TPU.

    Examples:
        >>> import tfdist
        >>> strategy = tfdist.create_strategy("mirrored")
        >>> strategy.num_replicas_in_sync
        2
    """
    if isinstance(strategy, str):
        known = {field.name for field in dataclasses.fields(StrategyConfig)} - {"name"}
        what = "option of create_strategy"
        faults = [unknown_name_message(what, name, known) for name in options if name not in known]
        if faults:
            raise ConfigError(faults)
        strategy = StrategyConfig(strategy, **options)
    elif not isinstance(strategy, StrategyConfig) or options:
        raise ConfigError(
            "strategy must be a name or a StrategyConfig, and options go with a name. "
            f"Received: {format_value(strategy)}, options {sorted(options)}."
        )
    verified = verify_settings.current()
    if verified:
        strategy = dataclasses.replace(strategy, **verified.strategy_fields(strategy.name))
    faults = list(validation.group_faults(strategy, "strategy"))
    for name, seconds in {"start_timeout": start_timeout, "grace_seconds": grace_seconds}.items():
        if not isinstance(seconds, numbers.Real) or not 0 <= seconds <= MOST_SECONDS:
            faults.append(f"{name} must be 0 to {MOST_SECONDS} seconds. Received: {format_value(seconds)}.")
    if faults:
        raise ConfigError(faults)
    member = check_member(cluster) if cluster else None
    traits = strategy.traits
    progress.write()  # so the supervisor knows that this task uses tfdist
    startup.check_versions()
    allocator.configure_malloc()
    if cluster is None and (traits.several_processes or traits.asynchronous):
        member = discovery.find_cluster(timeout=start_timeout)
    workers = len(member.cluster.training_tasks()) if member else 1
    # `replicas` counts those of all workers, so their number must be known before the devices are.
    strategy = strategy.on_workers(workers, len(tf.config.list_physical_devices("GPU")))
    if strategy.virtual_cpus:
        make_virtual_cpus(strategy.virtual_cpus)
    if verified and tf_internals.global_seed() is None:
        keras.utils.set_random_seed(verified.seed)
    make = registry.resolve("strategy", traits.factory or strategy.name, {})
    created: tf.distribute.Strategy = make(strategy, member, start_timeout, grace_seconds)
    if not isinstance(created, KerasStrategy):
        raise ConfigError(
            f"strategy {strategy.name!r} must return a strategy whose class has KerasStrategy of tfdist.strategies.base among "
            f"its bases. Received: {type(created).__name__}."
        )
    created.traits = traits
    created.configure(strategy)
    if not traits.asynchronous:
        created.engine = make_engine(created)
    model_methods.install(created)
    return created
