"""The engine of strategies whose replicas train in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compression.base import Compressor
from tfdist.engine import Engine
from tfdist.errors import ConfigError
from tfdist.step import execution


class SynchronousEngine(Engine):
    """Each replica computes the gradients of its part of a batch; their sum updates every copy of the weights.

    Args:
        strategy: The strategy.
        compressor: What sums gradients with fewer bytes, or None.
    """

    def __init__(self, strategy: Any, compressor: Compressor | None = None):
        self._strategy = strategy
        self.compressor = compressor
        self.num_replicas = strategy.num_replicas_in_sync

    def attach(self, model: keras.Model) -> None:
        """As of `Engine`."""
        execution.attach(model, self.compressor, self.nan_policy)

    def distribute(self, make: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> Any:
        """As of `Engine`."""
        return self._strategy.split_batches_from_function(make)

    def data_to_predict(self, model: keras.Model, data: Any, steps: int | None) -> Any:
        """As of `Engine`; a dataset is sharded by batches."""
        ends_within_execution = bool(steps and steps % model.steps_per_execution)
        if isinstance(data, tf.data.Dataset):
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
            data = data.with_options(options)
            return data.take(steps) if ends_within_execution else data
        if ends_within_execution:
            raise ConfigError(
                f"steps={steps} of predict must be a multiple of steps_per_execution={model.steps_per_execution} "
                "unless the data are a tf.data.Dataset."
            )
        return data
