"""The strategy for the cores of a TPU."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.config import StrategyConfig
from tfdist.errors import ConfigError
from tfdist.strategies.base import KerasStrategy


class TPUStrategy(KerasStrategy, tf.distribute.TPUStrategy):
    """A strategy for the cores of a TPU. tfdist's own tests never run it."""


def tpu(config: StrategyConfig, *_: Any) -> tf.distribute.Strategy:
    """Connects to a TPU, and returns a strategy with a replica on each of its cores.

    `config.devices` is the TPU's name or address; empty means the TPU of this host.

    Raises:
        ConfigError: There is no such TPU.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=config.devices)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError) as e:
        raise ConfigError(
            f"No TPU was found for strategy.devices={config.devices!r} (a TPU's name or address; empty means this "
            f"host's): {str(e).splitlines()[0]}"
        ) from e
    return TPUStrategy(resolver)
