"""A strategy to the communicator of its replicas."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.cross_process import CrossProcessCommunicator
from tfdist.collectives.in_process import InProcessCommunicator
from tfdist.compat import tf_internals
from tfdist.config.strategy_traits import traits_of
from tfdist.errors import ConfigError


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Refuses strategies whose gradients are not summed here.

    Raises:
        ConfigError: The strategy is another one.
    """
    if not traits_of(strategy).compresses:
        raise ConfigError(
            f"compression is not possible under {type(strategy).__name__} (yet); use multi_worker_mirrored or mirrored."
        )


def communicator_for(strategy: Any) -> Communicator:
    """Returns the group of a strategy's replicas, always the same one.

    Raises:
        ConfigError: As `check_strategy`.
    """
    check_strategy(strategy)
    if getattr(strategy, "communicator", None) is None:  # TensorFlow's own have no such attribute
        with tf.init_scope():
            strategy.communicator = (
                CrossProcessCommunicator(strategy)
                if traits_of(strategy).several_processes
                else InProcessCommunicator(tf_internals.num_replicas(strategy))
            )
    return strategy.communicator
