"""A model's step on one replica, weighted by the replica's share of the batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Function, Logs, Step, Structure
from tfdist.collectives import own_time
from tfdist.compat import keras_internals, tapes
from tfdist.compat.tf_internals import all_reduce
from tfdist.errors import ConfigError
from tfdist.gradients.optimizer import number_of_update
from tfdist.gradients.summing import sum_in_step
from tfdist.gradients.tape_sums import GradientsUsedError, TapeSums, applying_sums
from tfdist.replicas import batch_splitting, equal_weights, step_context
from tfdist.replicas.step_context import StepContext
from tfdist.step import empty_replicas, losses, model_building, split_layers
from tfdist.step.graph_copies import ComputedLogs

BATCH_NORM_WITHOUT_EXAMPLES = (
    "A training batch does not give each replica an example, and BatchNormalization would produce NaN; choose another batch "
    "size, or drop the last batch (drop_remainder=True)."
)
PACKED = (tf.float32, tf.float64)  # the types of packed logs


class ReplicaStep:
    """A step on one replica.

    Attributes:
        own_logs: The names of the logs that features add to those of the model.
        computes_logs: Whether the user's code computes the logs, so that they may differ from the results of the metrics.
    """

    def __init__(self, model: keras.Model, step: Step):
        self.model = model
        self._step = step
        self.name = getattr(step, "__name__", "step")  # a callable object has none
        self.trains = step == model.train_step
        self._replicas = model.distribute_strategy.num_replicas_in_sync
        self._trains_alone = self.trains and model.distribute_strategy.trains_alone
        self._is_alone = self._replicas == 1 or self._trains_alone  # a worker that trains alone has one replica
        self.counts = self._replicas > 1 and equal_weights.guard(model.distribute_strategy, model.weights)
        # A static batch size is a constant, whose dependence on the data would not be detected.
        self._relaxes = equal_weights.watch_averages(model.distribute_strategy, model) or self.counts
        # Keras' own step scales one loss and applies its gradients once.
        self._by_loss = keras_internals.is_keras_method(model, "train_step")
        step_method = "train_step" if self.trains else "test_step"
        overridable = (step_method, "compute_metrics", "get_metrics_result")
        self.computes_logs = not all(keras_internals.is_keras_method(model, name) for name in overridable)
        self.computed: ComputedLogs | None = None
        self.own_logs: frozenset[str] = frozenset()
        self._compiles = model.jit_compile and not model.run_eagerly
        self._compiled: dict[int, Function] = {}  # one for each replica
        self._variables: Any = None
        self._logs: Any = None
        own_step = self.trains and not self._by_loss and not self._is_alone
        self._watches_tapes = own_step and model.distribute_strategy.mesh is None and not self._compiles
        self.sums_at_tapes = False  # whether the tapes of the user's own step return sums over all replicas
        self._tapes: list[TapeSums] = []  # those of the step that is being traced
        self.number: Any = 0  # index of the traced step in its execution

    def __call__(self, data: Structure, totals: tf.Tensor | None) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
        """Runs the step on this replica's batch or split batch; `totals` is the result of `batch_splitting.count_examples`.

        Returns the packed logs, and the replica's part of the sums of the statistics (see `empty_replicas.snapshot_metrics`).
        """
        # Operations that need no data (counting the step, drawing a dropout mask) must not run after the data have ended.
        with tf.control_dependencies(own_time.tensors_in((data, totals))):
            data = batch_splitting.without_optionals(data)
            if isinstance(data, batch_splitting.SplitBatch):
                return self._run_split_batch(data, totals)
            return self._run_unsplit_batch(data), []

    def check_counts(self, data: Structure) -> None:
        """Traces the step, because eager values do not show whether they depend on data. Outside of replicas.

        Raises ConfigError if an integer weight is assigned a value that depends on the data, or the step cannot be traced.
        """
        batch = data.batch if isinstance(data, batch_splitting.SplitBatch) else data
        local = self.model.distribute_strategy.experimental_local_results
        try:
            with step_context.running(StepContext(None, is_alone=True)):
                model_building.trace(self._step, self.model, tf.nest.map_structure(lambda v: local(v)[0], batch))
        except ConfigError:
            raise
        except Exception as e:
            raise ConfigError(
                f"{type(self.model).__name__} has integer weights, and its {self.name} cannot be traced, which would show "
                f"whether they depend on the data ({e}). Create those that count with aggregation='sum'."
            ) from e

    def _run_split_batch(self, dealt: Structure, totals: Structure) -> tuple[dict[str, tf.Tensor], list[tf.Tensor]]:
        data, counts = dealt
        if self._relaxes:
            data = batch_splitting.relax_size(data)
        own_count = counts[0, 0]
        examples = tf.cast(own_count, tf.float64)
        all_examples = tf.cast(totals[0], tf.float64)
        if self.trains and self._replicas > 1 and self.model.distribute_strategy.traits.shared_variables:
            # All replicas share one copy of the statistics.
            data = self._check_batch_norm_has_examples(data, self._replicas - totals[1])
        after = empty_replicas.snapshot_metrics(self.model, own_count, totals)
        position = None
        # An even part of a batch of all replicas, not a batch of this replica alone.
        if counts.shape[1] == 3 and not self.model.distribute_strategy.batch_shares:
            position = functools.partial(
                batch_splitting.position_in_batch, self.model.distribute_strategy, counts[0, 1]
            )
        packed = self._run(data, tf.cast(own_count, tf.int32), lambda: examples / all_examples, position)
        counted = after()
        # The logs are averaged over the replicas, each weighted by its number of examples.
        weight = examples * self._replicas / all_examples
        packed = {name: tf.math.multiply_no_nan(logs, tf.cast(weight, logs.dtype)) for name, logs in packed.items()}
        return packed, counted

    def _run_unsplit_batch(self, data: Structure) -> dict[str, tf.Tensor]:
        examples = batch_splitting.examples(data)
        if self._relaxes:
            data = batch_splitting.relax_size(data)
        if examples is None:
            return self._run(data, None, lambda: 1 / self._replicas, None)
        if isinstance(examples, int):
            size = examples * self._replicas
            position = functools.partial(batch_splitting.position_in_batch, self.model.distribute_strategy, size)
            return self._run(data, tf.constant(examples), lambda: 1 / self._replicas, position)
        context = tf.distribute.get_replica_context()
        # float64 suits losses of any precision. The second value counts replicas without examples, which no replica knows alone.
        counts = tf.stack([tf.cast(examples, tf.float64), tf.cast(tf.equal(examples, 0), tf.float64)])

        def all_counts() -> tf.Tensor:
            return all_reduce(tf.distribute.ReduceOp.SUM, counts)

        if not self.trains or self._replicas == 1:  # a test step rarely needs its share
            return self._run(data, examples, lambda: counts[0] / all_counts()[0], None)
        sums = own_time.leave_out_wait(context.strategy, counts, all_counts)
        # The step waits for `sums`, so that this wait does not overlap with its work.
        if own_time.own_time_of(context.strategy):
            with tf.control_dependencies([sums]):
                data = tf.nest.map_structure(lambda v: None if v is None else tf.identity(v), data)
        data = self._check_batch_norm_has_examples(data, sums[1])
        return self._run(data, examples, lambda: counts[0] / sums[0], None)

    def _run(
        self,
        data: Structure,
        examples: tf.Tensor | None,
        part: Callable[[], Structure],
        position: Callable[[], tuple[tf.Tensor, tf.Tensor]] | None,
    ) -> dict[str, tf.Tensor]:
        """Runs the step on a batch of which `examples` rows count; `part` returns this replica's share of the batch of all replicas."""
        context = tf.distribute.get_replica_context()
        strategy = context.strategy
        share = None
        if not self._is_alone and (self.trains or self._compiles):
            share = part()  # may be a collective, which XLA does not compile
        elif self._trains_alone and examples is not None:
            share = tf.cast(examples > 0, tf.float64)
        strategy.decorrelate_random_numbers()  # a collective may have waited for the other replicas
        with strategy.as_one_replica():
            if not self._compiles:
                # A test step counts its examples together with the other replicas only if a loss or metric asks for the share.
                known = part if not (self._is_alone or self.trains) else lambda: share
                with self._within(data, share, examples, known, position):
                    return self._pack(self._step(data))
            replica = int(tf.get_static_value(context.replica_id_in_sync_group))
            if replica not in self._compiled:
                self._compiled[replica] = tf.function(
                    self._local, reduce_retracing=True, jit_compile=True, autograph=False
                )
            logs, applied = self._compiled[replica](data, examples, share)
        for grads, variables in zip(applied, self._variables, strict=True):
            self.model.optimizer.apply(grads, variables)
        return self._pack(logs)

    def _local(self, data: Structure, examples: tf.Tensor | None, share: tf.Tensor | float) -> Structure:
        """Runs the step up to its gradients. XLA compiles this function, so it must not contain collectives."""
        with self._within(data, share, examples, lambda: share, None) as context:
            captured = context.deferred = []
            logs = self._step(data)
        self._variables = [variables for _, variables in captured]
        return logs, [grads for grads, _ in captured]

    @contextlib.contextmanager
    def _within(
        self,
        data: Structure,
        share: tf.Tensor | float,
        examples: tf.Tensor | None,
        part: Callable[[], Structure],
        position: Callable[[], tuple[tf.Tensor, tf.Tensor]] | None,
    ) -> Iterator[StepContext]:
        split_layers.split_layers(self.model)
        context = StepContext(
            examples,
            part,
            rows=batch_splitting.examples(data),
            position=position,
            number=self.number,
            data=data,
            is_compiled=self._compiles,
            is_alone=self._is_alone,
            optimizer=self.model.optimizer,
            gradient_weight=share,
            weighs_loss=self._by_loss,
        )
        hook = None
        if self._watches_tapes:
            summed = functools.partial(sum_in_step, context, number=number_of_update(self.model))
            context.tapes = TapeSums(self.sums_at_tapes, context.graph, summed, self.model.trainable_variables)
            self._tapes.append(context.tapes)
            hook = context.tapes
        with losses.scale_losses_for_replica(self.model, context), tapes.hooked(hook):
            yield context

    @contextlib.contextmanager
    def watching_tapes(self) -> Iterator[None]:
        """Raises GradientsUsedError after the trace of a step within that uses its gradients, unless they are sums. Outside of replicas."""
        self._tapes = []
        with applying_sums(self.model, self.sums_at_tapes):
            yield
        if self.sums_at_tapes:
            for each in self._tapes:
                each.check_tables()
        if not self.sums_at_tapes and any([each.is_used() for each in self._tapes]):
            raise GradientsUsedError

    def watch_build(self) -> bool:
        """Returns whether the tapes return sums, as they do if the trace that has built the model has shown that the step needs them."""
        self.sums_at_tapes |= self._watches_tapes and model_building.uses_gradients(self.model)
        return self.sums_at_tapes

    def check_eager(self, data: Structure) -> None:
        """Checks the first step of a model that runs eagerly. Outside of replicas."""
        if self.counts:
            self.check_counts(data)
        self._watch_eager_tapes(data)

    def _watch_eager_tapes(self, data: Structure) -> None:
        """Finds out by a trace whether a step that runs eagerly uses its gradients; one that cannot be traced may. Outside of replicas."""
        if not self._watches_tapes:
            return
        batch = data.batch if isinstance(data, batch_splitting.SplitBatch) else data
        local = self.model.distribute_strategy.experimental_local_results
        try:
            with step_context.running(StepContext(None, is_alone=True)):
                model_building.trace(self._step, self.model, tf.nest.map_structure(lambda v: local(v)[0], batch))
            self.sums_at_tapes = model_building.uses_gradients(self.model)
        except Exception:
            self.sums_at_tapes = True

    def _check_batch_norm_has_examples(self, data: Structure, num_empty_replicas: tf.Tensor) -> Any:
        """Returns the data after asserting that no replica's BatchNormalization runs without examples, which would produce NaN."""
        if not any(isinstance(layer, keras.layers.BatchNormalization) for layer in keras_internals.layers(self.model)):
            return data
        assertion = tf.debugging.Assert(tf.equal(num_empty_replicas, 0), [BATCH_NORM_WITHOUT_EXAMPLES], summarize=1)
        with tf.control_dependencies([assertion]):
            return tf.nest.map_structure(tf.identity, data)

    def _pack(self, logs: Logs) -> dict[str, tf.Tensor]:
        """Concatenates the values of the logs, so that one collective reduces all of them."""
        self._logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        if self._replicas > 1 and self.computes_logs and tf.inside_function():
            self.computed = ComputedLogs(self.model, self._logs)
        own: dict[str, tf.Tensor] = {}
        for feature in self.model.distribute_strategy.features if self.trains else ():
            own |= feature.logs(self.model)
        if own:
            self.own_logs = frozenset(own)
            self._logs = {**self._logs, **tf.nest.map_structure(tf.convert_to_tensor, own)}
        for value in tf.nest.flatten(self._logs):
            if value.shape.num_elements() is None or not (value.dtype.is_numpy_compatible and value.dtype != tf.string):
                raise ConfigError(
                    f"A {self.name} must return numbers of known shape, to be averaged over the replicas. "
                    f"{type(self.model).__name__} returns {value.dtype.name} of shape {value.shape}."
                )
        packed: dict[str, list[tf.Tensor]] = {}
        for value in tf.nest.flatten(self._logs):
            dtype = _packed_dtype(value)
            packed.setdefault(dtype.name, []).append(tf.reshape(tf.cast(value, dtype), [-1]))
        return {dtype: tf.concat(values, 0) for dtype, values in packed.items()}

    def unpack(self, packed: dict[str, tf.Tensor]) -> Structure:
        """Returns logs from the packed values of `_pack`."""
        offsets = dict.fromkeys(packed, 0)

        def take(value: tf.Tensor) -> tf.Tensor:
            name = _packed_dtype(value).name
            size = value.shape.num_elements()
            taken = packed[name][offsets[name] : offsets[name] + size]
            offsets[name] += size
            return tf.reshape(taken, value.shape)

        return tf.nest.map_structure(take, self._logs)


def _packed_dtype(value: tf.Tensor) -> tf.DType:
    narrow, wide = PACKED
    return narrow if value.dtype in (narrow, tf.float16, tf.bfloat16, tf.bool) else wide
