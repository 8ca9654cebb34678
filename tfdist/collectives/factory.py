"""A strategy to the communicator of its replicas."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.cross_process import CrossProcessCommunicator
from tfdist.collectives.in_process import InProcessCommunicator
from tfdist.compat import tf_internals
from tfdist.errors import ConfigError

_GROUP = "_tfdist_group"  # a strategy's attribute
_STRATEGIES = (
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.MirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Refuses strategies whose gradients are not summed here.

    Raises:
        ConfigError: The strategy is another one.
    """
    if not isinstance(strategy, _STRATEGIES):
        raise ConfigError(
            f"compression is not possible under {type(strategy).__name__} (yet); use multi_worker_mirrored or mirrored."
        )


def communicator_for(strategy: tf.distribute.Strategy) -> Communicator:
    """Returns the group of a strategy's replicas, always the same one.

    Raises:
        ConfigError: As `check_strategy`.
    """
    check_strategy(strategy)
    if not hasattr(strategy, _GROUP):
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        with tf.init_scope():
            made = (
                CrossProcessCommunicator(strategy)
                if several
                else InProcessCommunicator(tf_internals.num_replicas(strategy))
            )
        setattr(strategy, _GROUP, made)
    return getattr(strategy, _GROUP)
