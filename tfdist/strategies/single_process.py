"""The strategies of one process: one device, mirrored variables, or central storage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives.communicator import tree_sum
from tfdist.compat import tf_strategies
from tfdist.compat.tf_internals import SyncOnReadVariable
from tfdist.config import StrategyConfig
from tfdist.strategies import startup
from tfdist.strategies.base import KerasStrategy, UniqueCollectiveKeys


class OneDeviceStrategy(KerasStrategy, tf.distribute.OneDeviceStrategy):
    """A strategy for one device."""


class MirroredStrategy(UniqueCollectiveKeys, KerasStrategy, tf_strategies.MirroredStrategy):
    """A strategy for several devices of one machine, each with a copy of the variables."""


class CentralStorageStrategy(KerasStrategy, tf.distribute.experimental.CentralStorageStrategy):
    """A strategy for several devices of one machine, with one copy of the variables."""

    def _create_variable(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        # Keras' metrics and seed generators add to themselves by `assign(self + value)`. TensorFlow would sum that
        # over the replicas into one variable and so count the old value once per replica.
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            return self._create_per_replica(next_creator, **kwargs)
        return super()._create_variable(next_creator, **kwargs)

    def _create_seed(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return super()._create_seed(functools.partial(self._create_per_replica, next_creator), **kwargs)

    def _create_copies(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        kwargs["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
        return self._create_per_replica(next_creator, **kwargs)

    def _create_per_replica(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        components = [next_creator(**kwargs) for _ in range(self.num_replicas_in_sync)]
        if len(components) == 1:
            return components[0]
        return SyncOnReadVariable(self, [component.get() for component in components], kwargs["aggregation"])


def one_device(config: StrategyConfig, *_: Any) -> tf.distribute.Strategy:
    """Returns a strategy of one device, with one replica: by default the first GPU, or the CPU without one.

    Raises:
        ConfigError: This process does not have the device.
    """
    startup.check_devices(config)
    default = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    return OneDeviceStrategy((config.device_names or [default])[0])


def mirrored(config: StrategyConfig, *_: Any) -> tf.distribute.Strategy:
    """Returns a strategy with a replica, and a copy of the variables, on each device of this process.

    By default its devices are all GPUs, or all CPUs without one.

    Raises:
        ConfigError: This process does not have one of the devices.
    """
    startup.check_devices(config)
    in_order = functools.partial(tf.distribute.ReductionToOneDevice, accumulation_fn=tree_sum)
    # TensorFlow chooses NCCL if there are GPUs.
    operations: dict[str, Callable[[], tf.distribute.CrossDeviceOps | None]] = {
        "auto": lambda: None if tf.config.list_logical_devices("GPU") else in_order(),
        "grpc": in_order,
        "nccl": lambda: tf.distribute.NcclAllReduce(num_packs=1),
    }
    return MirroredStrategy(config.device_names or None, operations[config.transport]())


def central_storage(config: StrategyConfig, *_: Any) -> tf.distribute.Strategy:
    """Returns a strategy with a replica on each device of this process, and one copy of the variables for all.

    By default its devices are all GPUs, or all CPUs without one.

    Raises:
        ConfigError: This process does not have one of the devices.
    """
    startup.check_devices(config)
    return CentralStorageStrategy(config.device_names or None)


def make_virtual_cpus(count: int) -> None:
    """Splits this process's CPU into `count` virtual devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as e:
        # TensorFlow has started, which is fine if it has the same number of CPUs.
        present = len(tf.config.list_logical_devices("CPU"))
        if present != count:
            raise startup.already_started_error(f"{count} virtual CPUs cannot be made (there are {present})") from e
