"""Conditions whose branches may have collectives."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.collectives.communicator import communicator_for
from tfdist.config.strategy_traits import traits_of
from tfdist.strategy import as_ours


def cond_of(strategy: tf.distribute.Strategy) -> Callable[..., None]:
    """Returns the `cond` whose branches may have collectives of the strategy."""
    ours = as_ours(strategy)
    if ours and ours.mesh and ours.mesh.group.processes > 1:
        cond: Callable[..., None] = ours.mesh.group.cond
        return cond
    return communicator_for(strategy).cond if traits_of(strategy).compresses else tf.cond
