"""`keras.distribution.set_distribution` beside a `Trainer`: chooses the strategy, compares both, and honors `auto_shard_dataset`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Data
from tfdist.compat import keras_distribution
from tfdist.compat.keras_loops import DEFAULT_BATCH_SIZE
from tfdist.config import StrategyConfig, StrategyTraits, validation
from tfdist.config.strategy_traits import STRATEGIES
from tfdist.data import worker_rows
from tfdist.errors import ConfigError
from tfdist.strategy import Strategy
from tfdist.training import input_data


def choose_strategy(
    distribution: Any,
    strategy: str | StrategyConfig | tf.distribute.Strategy | None,
    options: Mapping[str, Any],
    has_peers: bool,
) -> tuple[str | StrategyConfig | tf.distribute.Strategy, Mapping[str, Any]]:
    """Returns the strategy of a Trainer and its options, of which the distribution sets the name and the devices if they are absent.

    `distribution` is the value of `keras.distribution.distribution()`. Raises ConfigError if it is not a DataParallel, has devices that
    this process lacks, or contradicts the arguments.
    """
    if strategy is None:
        strategy = "multi_worker_mirrored" if distribution is not None and has_peers else "mirrored"
    if distribution is None:
        return strategy, options
    if isinstance(distribution, keras.distribution.ModelParallel):
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        if isinstance(strategy, StrategyConfig):
            name = strategy.name
        traits = STRATEGIES.get(name)
        if traits is None or not traits.several_processes:
            raise ConfigError(
                "keras.distribution.ModelParallel needs the strategy multi_worker_mirrored, by name, and a cluster with a worker for each device "
                f"of its mesh. Received: {name}."
            )
        axes = distribution.device_mesh.axis_names
        batch = distribution.batch_dim_name
        if axes.count(batch) != 1 or len(set(axes)) < len(axes):
            raise ConfigError(
                "The axes of the DeviceMesh of keras.distribution.ModelParallel must have different names, of which batch_dim_name is one. "
                f"Received: axes {axes}, batch_dim_name {batch!r}."
            )
        return strategy, options
    names = _device_names(distribution)
    if isinstance(strategy, str):
        strategy = StrategyConfig(strategy, **options)
        options = {}
    if not isinstance(strategy, StrategyConfig) or options:
        return strategy, options  # `check` compares a strategy; `create_strategy` raises an error for other values
    if any(validation.group_faults(strategy, "strategy")):  # `create_strategy` raises all of them
        return strategy, options
    _check_traits(strategy.name, strategy.traits)
    if strategy.traits.devices != "each":
        return strategy, options
    if strategy.replicas:  # `check` compares the devices
        return strategy, options
    if strategy.devices:
        _check_devices(names, strategy.device_names)
        return strategy, options
    present = keras_distribution.present_devices()
    absent = [name for name in names if name not in present]
    if absent:
        raise ConfigError(
            f"keras.distribution.DataParallel names {absent[0].lower()}, which is not there. This process has {', '.join(present).lower()}. "
            "Name the devices of this process alone, or create virtual CPUs by devices=2 of the Trainer."
        )
    return dataclasses.replace(strategy, devices=",".join(names)), options


def check(distribution: Any, strategy: Strategy) -> None:
    """Raises ConfigError unless the distribution is None or a DataParallel over the devices that the strategy has in this process."""
    if distribution is None or strategy.mesh is not None:
        return
    names = _device_names(distribution)
    _check_traits(strategy.config.name, strategy.traits)
    if strategy.traits.devices == "each":
        _check_devices(names, strategy.extended.worker_devices)


def as_own_data(data: Data, validation: Data, arguments: dict[str, Any], workers: int) -> tuple[Data, Data]:
    """Returns data and validation data as each worker's own: the meaning of `auto_shard_dataset=False`.

    As in Keras, a batch of these data is the worker's part of the global batch. Changes targets, weights and batch sizes in `arguments`.

    Raises:
        ConfigError: `validation_split` is set, which would split each worker's rows.
    """
    local_size = arguments.get("batch_size") or DEFAULT_BATCH_SIZE
    if _is_arrays(data):
        if arguments.get("validation_split"):
            raise ConfigError(
                "validation_split cannot split rows that are already sharded (auto_shard_dataset=False of keras.distribution). Give each "
                "worker's part as validation_data."
            )
        data = worker_rows.own_rows(data, arguments.pop("y", None), arguments.pop("sample_weight", None))
        arguments["batch_size"] = local_size * workers
    if _is_arrays(validation):
        validation = worker_rows.own_rows(*keras.utils.unpack_x_y_sample_weight(validation))
        arguments["validation_batch_size"] = (arguments.get("validation_batch_size") or local_size) * workers
    return _without_sharding(data), _without_sharding(validation)


def _is_arrays(data: Data) -> bool:
    others = (tf.data.Dataset, tf.distribute.DistributedDataset, keras.utils.PyDataset, worker_rows.OwnRows)
    if data is None or isinstance(data, others) or hasattr(data, "__next__"):
        return False
    return not input_data.is_function(data)


def _without_sharding(data: Data) -> Data:
    if not isinstance(data, tf.data.Dataset):
        return data
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


def _device_names(distribution: Any) -> list[str]:
    """Returns the devices of a DataParallel, as `CPU:0`. Raises ConfigError for another distribution."""
    if not isinstance(distribution, keras.distribution.DataParallel):
        raise ConfigError(
            f"keras.distribution has a {type(distribution).__name__}, which this Trainer cannot follow. Use keras.distribution.DataParallel, or "
            "set a ModelParallel before you create the Trainer, whose strategy must be multi_worker_mirrored."
        )
    return _normalize(distribution.device_mesh.devices.flatten())


def _normalize(names: Iterable[Any]) -> list[str]:
    """Returns different devices as type and number, such as `CPU:0`, without the task."""
    normal: dict[str, None] = {}
    for name in names:
        device = str(name).strip().upper().rpartition("DEVICE:")[2].lstrip("/")
        if ":" not in device:
            device += ":0"
        normal[device] = None
    return list(normal)


def _check_traits(name: str, traits: StrategyTraits) -> None:
    if traits.asynchronous or (traits.shared_variables and traits.devices == "each"):
        raise ConfigError(
            f"strategy {name} contradicts keras.distribution.DataParallel, which copies the variables to every device. Remove "
            "keras.distribution.set_distribution, or create tfdist.Trainer() without a strategy."
        )


def _check_devices(names: list[str], devices: Iterable[str]) -> None:
    own = _normalize(devices)
    if set(own) != set(names):
        raise ConfigError(
            "devices of tfdist.Trainer and of keras.distribution.DataParallel must be the same. Received: "
            f"{', '.join(own).lower()} and {', '.join(names).lower()}. Set them in one of both only, and create the Trainer after the call "
            "of set_distribution."
        )
