"""The engine of strategies with synchronous replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Data, DataIterator, Logs, StepFunction, Structure
from tfdist.compat import keras_loops
from tfdist.compression.base import Compressor
from tfdist.data import worker_rows
from tfdist.data.source import DataSource, run_to_end
from tfdist.data.stored import StoredData
from tfdist.engine import Engine
from tfdist.step.execution import Execution, UndrawnIterator, as_number, attach
from tfdist.step.prediction import Prediction
from tfdist.strategy import Strategy


class SynchronousEngine(Engine):
    """The engine of strategies with synchronous replicas: the sum of their gradients updates all weights."""

    def __init__(self, strategy: Strategy, compressor: Compressor | None = None):
        self.strategy = strategy
        self.compressor = compressor
        self.num_replicas = strategy.num_replicas_in_sync

    def attach(self, model: keras.Model) -> None:
        attach(model, self)

    def source(self, dataset: Data, steps: int | None) -> DataSource:
        return self.strategy.source(dataset, steps)

    def source_from_function(self, make: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> DataSource:
        return self.strategy.source_from_function(make)

    def source_from_stored(self, data: StoredData, start: int, steps: int | None) -> DataSource:
        return self.strategy.source_from_stored(data, start, steps)

    def run(self, function: StepFunction, iterator: DataIterator, remaining_steps: int | None) -> Logs:
        if isinstance(function, Execution):
            return function.run(iterator, remaining_steps)
        if self.num_replicas > 1:
            iterator = UndrawnIterator(iterator)
        return run_to_end(function, iterator)

    def run_batch(self, function: StepFunction, batch: Structure, is_whole: bool = True) -> Logs:
        if isinstance(function, Execution):
            logs = function.run_batch(batch, is_whole)
            return function.exact_logs() if is_whole else logs
        return function(iter([batch]))

    def own_step_ms(self, model: keras.Model, steps: int) -> Mapping[str, float]:
        own_time = self.strategy.own_time
        if own_time is None or self.ranks is None or self.ranks.size == 1:
            return {}
        seconds = own_time.take()
        if not steps:
            return {}
        ms = 1000 * seconds / steps
        gathered = self.ranks.gather(ms)[:, 0]
        if not np.isfinite(gathered).all():
            return {}
        if isinstance(model.train_function, Execution):
            model.train_function.measured.add("perf/own_step_ms", ms)
        return dict(zip(self.ranks.names, gathered.tolist(), strict=True))

    def epoch_logs(self, model: keras.Model, function: StepFunction, logs: Logs) -> Logs:
        """Implements `Engine.epoch_logs`. Reads variables in the logs now, because validation would change them before callbacks receive the logs."""
        is_own = isinstance(function, Execution) and logs is not None and logs is function.logs
        of_features: dict[str, Any] = {}
        if is_own and function.own_logs:
            of_features = {name: logs[name] for name in function.own_logs}
            logs = {name: value for name, value in logs.items() if name not in of_features}
        results = keras_loops.metrics_or_logs(model, logs)
        if results is not logs:
            results = {name: as_number(value) for name, value in results.items()}
        elif is_own:
            results = {**logs, **function.computed_logs()}
        return {**results, **of_features} if of_features else results

    def predictor(self, model: keras.Model, passes: Any, steps: int | None) -> Callable[[int], Structure]:

        def predict(count: int) -> Structure:
            batches: list[Structure] = []
            with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                while len(batches) < count:
                    batches.append(next(passes.iterator))
            if not batches:
                return None
            try:
                if isinstance(model.predict_function, Prediction):
                    return model.predict_function(batches, is_whole=False)
                return model.predict_function(batches)
            except StopIteration:
                return None

        return predict

    def data_to_predict(self, model: keras.Model, data: Structure) -> Structure:
        """Implements `Engine.data_to_predict`; a dataset is sharded by batches, unless each worker has its own."""
        has_peers = self.strategy.traits.several_processes and self.strategy.num_workers > 1
        if not isinstance(data, tf.data.Dataset) or (worker_rows.is_own(data) and has_peers):
            return data
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        return data.with_options(options)

    def predict_batch(self, model: keras.Model, batch: Structure) -> Structure:
        return model.predict_function([batch])
