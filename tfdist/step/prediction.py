"""`Prediction`: a model's `predict_function`, which predicts batches on all replicas."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.compat import keras_loops
from tfdist.errors import stop_iteration_error
from tfdist.replicas import batch_splitting, declared_weights, equal_weights, step_context
from tfdist.replicas.batch_splitting import SplitBatch
from tfdist.replicas.step_context import StepContext
from tfdist.step import split_layers


def as_tensor(value: Structure) -> Structure:
    """Converts an array to a tensor. A `tf.function` does so with its arguments, but `run_eagerly=True` does not use one."""
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


class Prediction:
    """A model's `predict_function`: predicts batches, each on all replicas.

    Attributes:
        own_rows: For each batch of the workers' own data, the number of rows of each replica of this worker. The caller clears it.
    """

    def __init__(self, model: keras.Model):
        self.own_rows: list[list[int]] = []
        self._model = model
        self._strategy = model.distribute_strategy
        self._step = model.predict_step
        self._run = self._run_one
        if not model.run_eagerly:
            if model.jit_compile:
                self._step = tf.function(self._step, reduce_retracing=True, jit_compile=True)
            self._run = tf.function(self._run_one, reduce_retracing=True, autograph=False)

    def __call__(self, batches: Sequence[Structure], is_whole: bool = True) -> Structure:
        """Returns the outputs of a list of batches, concatenated. Each replica predicts its part of tensors if `is_whole`, else all of them.

        Raises StopIteration if no example remains, and RuntimeError if the user's step raises StopIteration.
        """
        outputs = []
        for batch in batches:
            if isinstance(batch, SplitBatch) and not batch_splitting.count_examples(batch, self._strategy)[0]:
                break
            try:
                outputs.append(self._run(tf.nest.map_structure(as_tensor, batch), is_whole))
                if isinstance(batch, SplitBatch) and batch_splitting.is_own(batch, self._strategy):
                    self.own_rows.append(batch_splitting.local_rows(batch, self._strategy))
            except StopIteration as e:
                raise stop_iteration_error("The model's predict_step", e) from e
        if not outputs:
            raise StopIteration
        return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(keras_loops.concatenate, *outputs)

    def _run_one(self, data: Structure, is_whole: bool) -> Structure:
        """Predicts one batch."""
        counts = equal_weights.guard(self._strategy, self._model.weights)
        if is_whole or isinstance(data, batch_splitting.WholeBatch):
            data = batch_splitting.split_whole(data, self._strategy)

        def replica(data: Structure) -> Structure:
            data = batch_splitting.without_optionals(data)
            if not isinstance(data, SplitBatch):
                data = SplitBatch(data, None)
            context = self._context(data)
            with step_context.running(context):
                outputs = self._step(batch_splitting.relax_size(data.batch) if counts else data.batch)
            examples = tf.constant(1) if data.counts is None else context.examples
            return batch_splitting.counted_rows(outputs, data), examples

        with declared_weights.combining(self._strategy, self._model, trains=False) as combine:
            outputs, examples = self._strategy.run(replica, args=(data,))
            combine(examples)
        return keras_loops.concatenate_replicas(outputs, self._strategy, self._strategy.traits.several_processes)

    def _context(self, data: SplitBatch) -> StepContext:
        split_layers.split_layers(self._model)
        rows = examples = batch_splitting.examples(data.batch)
        position = None
        if data.counts is not None:
            examples = data.counts[0, 0]
            # An even part of a batch of all replicas.
            if data.counts.shape[1] == 3 and not self._strategy.batch_shares:
                position = functools.partial(batch_splitting.position_in_batch, self._strategy, data.counts[0, 1])
        return StepContext(
            None if examples is None else tf.convert_to_tensor(examples),
            rows=rows,
            position=position,
            is_compiled=self._model.jit_compile and not self._model.run_eagerly,
            is_alone=self._strategy.num_replicas_in_sync == 1,
        )
