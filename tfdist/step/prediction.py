"""The function that Keras' `predict` and `predict_on_batch` call for each execution of one or several steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_loops
from tfdist.replicas import batch_splitting, equal_weights
from tfdist.replicas.batch_splitting import SplitBatch
from tfdist.step.user_code import stop_iteration_error


class Prediction:
    """Predicts batches, each on all replicas.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._strategy = model.distribute_strategy
        self._step = model.predict_step
        self._run = self._run_one
        if not model.run_eagerly:
            if model.jit_compile:
                self._step = tf.function(self._step, reduce_retracing=True, jit_compile=True)
            self._run = tf.function(self._run_one, reduce_retracing=True, autograph=False)

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Returns the outputs of a list of batches, as of one.

        Raises:
            StopIteration: No example is left.
            RuntimeError: The user's step raises StopIteration.
        """
        is_whole = self._strategy.method == "predict_on_batch" and self._strategy.num_replicas_in_sync > 1
        each = []
        for batch in batches:
            if isinstance(batch, SplitBatch) and not batch_splitting.count_examples(batch, self._strategy)[0]:
                break
            try:
                each.append(self._run(batch, is_whole))
            except StopIteration as e:
                raise stop_iteration_error("The model's predict_step", e) from e
        if not each:
            raise StopIteration
        return each[0] if len(each) == 1 else tf.nest.map_structure(keras_loops.concatenate, *each)

    def _run_one(self, data: Any, is_whole: bool) -> Any:
        """Predicts one batch.

        Args:
            data: A batch of a distributed dataset; or what all replicas are given, each of which takes its part.
            is_whole: Whether it is the latter.
        """
        counts = equal_weights.guard(self._strategy, self._model.weights)

        def replica(data: Any) -> Any:
            data = tf.nest.map_structure(lambda v: None if isinstance(v, tf.experimental.Optional) else v, data)
            if not isinstance(data, SplitBatch):
                data = batch_splitting.part_of_batch(data, self._strategy) if is_whole else SplitBatch(data, None)
            outputs = self._step(batch_splitting.relax_size(data.batch) if counts else data.batch)
            return batch_splitting.counted_rows(outputs, data)

        return keras_loops.concatenate_replicas(self._strategy.run(replica, args=(data,)), self._strategy)
