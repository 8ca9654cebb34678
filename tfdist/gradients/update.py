"""The update of variables with reduced gradients: accumulation, clipping, moving averages, equal bits on all workers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.collectives import hardware
from tfdist.collectives.communicator import communicator_for
from tfdist.collectives.requests import AllReduce, RankContext
from tfdist.compat import keras_internals
from tfdist.compression.base import Compressor
from tfdist.errors import ConfigError
from tfdist.gradients import gradient_lists, worker_tables
from tfdist.gradients.conditions import cond_of
from tfdist.gradients.reduction import Reduction, bucketed_all_reduce, uses_bucketed_all_reduce
from tfdist.gradients.sharded_update import ELEMENTWISE, ShardedUpdate
from tfdist.layers.table import common, is_own
from tfdist.strategy import as_ours

_BROADCAST_LANE = -3  # a lane that gradients do not use


class AccumulatingUpdate:
    """The replacement of an optimizer's `_backend_apply_gradients`.

    It runs Keras' conditional updates in cross-replica context, where the variables of all replicas can be assigned. `scaled` means that
    a `LossScaleOptimizer` wraps the optimizer.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, scaled: bool, clips_after_reduce: bool):
        self.leaf = self._optimizer = optimizer
        self._keras_update = keras_internals.update_method(optimizer)
        self.scaled = scaled
        self.compressor: Compressor | None = None
        self.reduction: Reduction | None = None  # None until the optimizer is built
        self.sharded: ShardedUpdate | None = None  # None unless the slots are split
        # Replaced where variables live as pieces.
        self.clip_pieces: Callable[[Sequence[Gradient], Variables], Sequence[Gradient]] = lambda grads, _: grads
        self.finite: Any = None  # the `FiniteUpdates`, unless non-finite updates are applied, too
        self.takes_sums = False  # whether the gradients to apply are sums over all replicas
        self.exchange: Any = None  # the `LocalSteps` of a worker that trains alone
        self._clip: Callable[[Sequence[Gradient]], Sequence[Gradient]] | None = None
        # An optimizer that overrides `apply` must receive what one process would: each step's reduced gradient.
        self._reduces_each_step = type(optimizer).apply is not keras.optimizers.Optimizer.apply
        clips_after_reduce = clips_after_reduce or bool(
            optimizer.gradient_accumulation_steps and self._reduces_each_step
        )
        if not clips_after_reduce and any((optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)):
            self._clip = keras_internals.clip_method(optimizer)
            keras_internals.replace_clip(optimizer, list)  # `clip_local` has already clipped

    @property
    def trains_alone(self) -> bool:
        """True if each worker applies its own gradients."""
        ours = as_ours(tf.distribute.get_strategy())
        return bool(ours and ours.trains_alone)

    def clip_local(self, grads: Sequence[Gradient], scale: tf.Tensor | float = 1.0) -> Sequence[Gradient]:
        """Returns this replica's gradients, clipped unless the reduced gradient is. `scale` is the loss scale that they contain."""
        if self._clip is None:
            return grads
        present = [grad for grad in grads if grad is not None]
        clipped = gradient_lists.scale(self._clip(gradient_lists.scale(present, 1 / scale)), scale)
        if self.scaled:  # LossScaleOptimizer must see an inf, even if clipping makes it finite
            clipped = gradient_lists.add_scalar(clipped, gradient_lists.nan_unless_finite(present))
        remaining = iter(clipped)
        return [None if grad is None else next(remaining) for grad in grads]

    @property
    def clips_local(self) -> bool:
        """True if each replica clips its own gradient, before the sum."""
        return self._clip is not None

    def clip_tables(
        self,
        grads: Sequence[Gradient],
        variables: Variables,
        scale: tf.Tensor | float = 1.0,
        accumulated: bool = False,
    ) -> Sequence[Gradient]:
        """Clips reduced gradients if a table is in parts, where Keras would use the norm of each part.

        Gradients that will be accumulated are clipped later (`accumulated`). `scale` is as in `clip_local`.
        """
        clips = not self.clips_local and worker_tables.clips(self._optimizer, self.variables)
        if not clips or accumulated != bool(self._optimizer.gradient_accumulation_steps):
            return grads
        worker_tables.take_over_clip(self._optimizer, self.variables)
        return worker_tables.clip(self._optimizer, grads, variables, scale)

    @property
    def variables(self) -> Sequence[Gradient]:
        """The variables that the optimizer was built with."""
        return keras_internals.trainable_variables(self._optimizer)

    def reduce(
        self, grads: Sequence[Gradient], variables: Variables, scale: tf.Tensor | float = None
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Returns the sums of the gradients over all replicas, and whether all are finite, as `Reduction` does. In cross-replica context.

        This worker's rows of tables are summed already.
        """
        strategy = tf.distribute.get_strategy()
        assert self.reduction is not None  # noqa: S101 (for the type checker: callers have tested it)
        totals = list(grads)
        finite = tf.constant(True)
        shared = worker_tables.shared_indices(variables)
        if shared:
            numbers = [self._number(variables[index]) for index in shared]
            local = [grads[index] for index in shared]
            sums, finite = self.reduction(local, numbers, self._optimizer.iterations, scale)
            for index, total in zip(shared, sums, strict=True):
                totals[index] = total
        if len(shared) < len(grads):
            first = [strategy.experimental_local_results(total)[0] for total in totals]
            finite &= tf.math.is_finite(gradient_lists.nan_unless_finite(first))
        return totals, finite

    def _number(self, variable: keras.Variable) -> int:
        try:
            return keras_internals.variable_index(self._optimizer, variable)
        except KeyError:
            raise ConfigError(
                f"The optimizer {type(self._optimizer).__name__} was built without the variable "
                f"{getattr(variable, 'path', variable.name)}, which was perhaps frozen then: compile the model with a new "
                "optimizer."
            ) from None

    @property
    def accumulates(self) -> bool:
        """Returns whether this object accumulates local gradients and reduces them, once per update."""
        return bool(self._optimizer.gradient_accumulation_steps) and not (self._reduces_each_step or self.takes_sums)

    @property
    def scattering(self) -> ShardedUpdate | None:
        """The update by pieces if each process receives only its pieces of the gradients' sum, else None."""
        if self.sharded is None or self.compressor or self.sharded.clips_by_norm or self.takes_sums:
            return None
        return self.sharded

    def __call__(self, grads: Sequence[Gradient], variables: Variables) -> None:
        optimizer = self._optimizer
        grads = gradient_lists.deduplicate_rows(grads)  # rows of several replicas may have the same id
        context = tf.distribute.get_replica_context()
        if context and (self.sharded or optimizer.gradient_accumulation_steps or optimizer.ema_overwrite_frequency):
            context.merge_call(functools.partial(self._across, variables=variables), args=(grads,))
        else:
            grads = self.clip_pieces(self._through_features(grads, variables), variables)
            self._keras_update(grads, variables)
            self._broadcast(context)

    def _through_features(self, grads: Sequence[Gradient], variables: Variables) -> Sequence[Gradient]:
        """Returns reduced gradients as the features of the strategy return them. Within a replica."""
        ours = as_ours(tf.distribute.get_strategy())
        for feature in ours.features if ours else ():
            grads = feature.reduced(self._optimizer, grads, variables)
        return grads

    def _broadcast(self, context: tf.distribute.ReplicaContext | None) -> None:
        """Makes the updated variables equal on all workers."""
        if self.trains_alone:
            return
        if context and _may_differ_between_workers(self._optimizer, context.strategy, clips=self._clip is None):
            context.merge_call(_broadcast_update, args=(self._optimizer,))

    def _across(self, strategy: tf.distribute.Strategy, grads: Sequence[Gradient], variables: Variables) -> None:
        optimizer = self._optimizer
        step = tf.convert_to_tensor(keras_internals.step_counter(optimizer).value) + 1
        update = tf.convert_to_tensor(optimizer.iterations) + 1

        def on_each_replica(function: Callable[..., None]) -> None:
            strategy.extended.call_for_each_replica(function, args=(grads, variables))

        steps = optimizer.gradient_accumulation_steps
        if steps:
            end = functools.partial(self._end, strategy, grads, variables)
            cond_of(strategy)(step % steps == 0, end, lambda: on_each_replica(self._add))
        else:
            self._step_across(strategy, grads, variables)
        if not optimizer.use_ema:
            return
        trained = keras_internals.trainable_variables(optimizer)
        cond = tf.cond
        if self.sharded:
            self.sharded.move_averages()
            cond = cond_of(strategy)  # the averages are gathered
        else:
            strategy.extended.call_for_each_replica(keras_internals.moving_average_method(optimizer), args=(trained,))
        frequency = optimizer.ema_overwrite_frequency
        if frequency:
            overwrite = keras_internals.overwrite_method(optimizer)
            cond(update % frequency == 0, lambda: overwrite(trained), lambda: None)

    def _step(self, grads: Sequence[Gradient], variables: Variables) -> None:
        grads = self._through_features(grads, variables)
        grads = self.clip_pieces(self.clip_tables(grads, variables, accumulated=True), variables)
        keras_internals.update_variables(self._optimizer, grads, variables)
        self._broadcast(tf.distribute.get_replica_context())

    def _add(self, grads: Sequence[Gradient], variables: Variables) -> None:
        for accumulator, total, _ in self._totals(grads, variables):
            accumulator.assign(total)

    def _end(self, strategy: tf.distribute.Strategy, grads: Sequence[Gradient], variables: Variables) -> None:
        """Updates with the accumulated gradients, which are compressed only once."""
        # Collectives of tfdist need cross-replica context, where they see the values of all replicas: hence the alternation of calls
        # for each replica (clip and reset, then update) and reductions between them.
        call = strategy.extended.call_for_each_replica
        # TensorFlow's all-reduce works within a replica. Gradients of an optimizer that overrides `apply` were reduced at each step.
        is_summed = self.accumulates and not self.trains_alone
        if self.sharded and not is_summed:  # a step that uses its gradients has accumulated sums
            self._step_across(strategy, call(self._shares, args=(grads, variables)), variables)
            return
        if not is_summed or not (self.reduction or self.sharded or uses_bucketed_all_reduce(strategy)):
            call(self._update, args=(grads, variables))
            return
        shares = call(self._shares, args=(grads, variables))
        if self.scattering:
            self._step_across(strategy, self.scattering.reduce_scatter(shares, variables), variables)
            return
        if not self.reduction:
            step = tf.cast(self._optimizer.iterations, tf.int64)
            totals = list(shares)
            shared = worker_tables.shared_indices(variables)
            if shared:
                sums = bucketed_all_reduce(strategy, [shares[index] for index in shared], step)
                for index, total in zip(shared, sums, strict=True):
                    totals[index] = total
            self._step_across(strategy, totals, variables)
            return
        totals, finite = self.reduce(shares, variables)
        # The accumulators are reset by now, even if the sum is not finite: a NaN in them would stay in all later updates.
        cond_of(strategy)(finite, lambda: self._step_across(strategy, totals, variables), lambda: None)

    def _step_across(self, strategy: tf.distribute.Strategy, grads: Sequence[Gradient], variables: Variables) -> None:
        if self.sharded:
            grads = strategy.extended.call_for_each_replica(self._through_features, args=(grads, variables))
            self.sharded.update(grads, variables, are_pieces=self.scattering is not None)
        else:
            strategy.extended.call_for_each_replica(self._step, args=(grads, variables))

    def _update(self, grads: Sequence[Gradient], variables: Variables) -> None:
        shares = self._shares(grads, variables)
        if self.accumulates and not self.trains_alone:
            shares = gradient_lists.all_reduce(tf.distribute.ReduceOp.SUM, shares)
        self._step(shares, variables)

    def _shares(self, grads: Sequence[Gradient], variables: Variables) -> list[tf.Tensor]:
        """Returns this replica's part of the mean over steps and replicas, and resets the accumulators.

        If gradients were reduced at each step, returns the entire mean instead of a part.
        """
        steps = self._optimizer.gradient_accumulation_steps
        totals = self._totals(grads, variables)
        shares = self.clip_local([total / (steps * parts) for _, total, parts in totals])
        # Like Keras, also reset the accumulators of variables without a gradient at this step.
        for accumulator in keras_internals.accumulators(self._optimizer):
            accumulator.value.assign(tf.zeros_like(accumulator.value))
        return list(shares)

    def _totals(self, grads: Sequence[Gradient], variables: Variables) -> Iterator[tuple[tf.Variable, tf.Tensor, int]]:
        """Yields for each gradient its accumulator, the new value of it, and the number of replicas whose values are summed later."""
        accumulators = keras_internals.accumulators(self._optimizer)
        for grad, variable in zip(gradient_lists.with_static_shapes(grads, variables), variables, strict=True):
            accumulator = accumulators[keras_internals.variable_index(self._optimizer, variable)].value
            replicas = 1
            if self.accumulates and not self.trains_alone and not is_own(variable):
                # A replica's gradient is its share of a sum, but accumulators are averaged over the replicas, as statistics are. With
                # this factor their mean is the accumulator of one process.
                replicas = tf.distribute.get_strategy().num_replicas_in_sync
            yield accumulator, accumulator + tf.convert_to_tensor(grad) * replicas, replicas


def _may_differ_between_workers(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy, clips: bool
) -> bool:
    """Returns whether an update may give different bits on different workers.

    All workers apply the same gradient. An elementwise optimizer gives the same result everywhere. An optimizer that sums over a
    variable (a norm, a matrix product) may round differently on another processor, see `collectives.hardware`. A custom optimizer
    counts as one that sums. `clips` means that it clips by the reduced gradient's norm.
    """
    if not (hardware.describe_difference(strategy) and uses_bucketed_all_reduce(strategy)):
        return False
    elementwise = any(type(optimizer).update_step is kind.update_step for kind in ELEMENTWISE)
    return not elementwise or (clips and bool(optimizer.clipnorm or optimizer.global_clipnorm))


def _broadcast_update(strategy: tf.distribute.Strategy, optimizer: keras.optimizers.Optimizer) -> None:
    """Sends the chief's updated variables to all workers, which would otherwise drift apart. A cross-replica collective."""
    warnings.warn(
        f"The workers differ in {hardware.describe_difference(strategy)}, so they round {type(optimizer).__name__}'s sums differently: the "
        "chief's variables are sent to all workers after each update. To avoid that, set TF_NUM_INTRAOP_THREADS to the same "
        "number on all workers.",
        stacklevel=2,
    )
    group = communicator_for(strategy)
    local = strategy.experimental_local_results
    variables = common([*keras_internals.trainable_variables(optimizer), *optimizer.variables], [optimizer])
    values = {id(variable.value): variable.value for variable in variables if _is_replicated(variable.value)}.values()

    # Exchanges have no broadcast: the sum of the chief's values and zeros is exact.
    def from_chief(replica: int, member: RankContext) -> Generator[Any, Any, Sequence[tf.Tensor]]:
        sent = [tf.cast(local(value)[replica], _wire_dtype(value.dtype)) for value in values]
        if member.rank != 0:
            sent = list(map(tf.zeros_like, sent))
        return (yield AllReduce(sent))

    members = group.contexts(tf.constant(0, tf.int64))
    exchanges = [from_chief(replica, member) for replica, member in enumerate(members)]
    for replica, new_values in enumerate(group.run(exchanges, _BROADCAST_LANE)):
        for value, new in zip(values, new_values, strict=True):
            local(value)[replica].assign(tf.cast(new, value.dtype))


def _is_replicated(value: tf.Variable) -> bool:
    """Returns whether all replicas should hold equal values; gradient accumulators may differ."""
    return value.dtype.is_floating and value.synchronization != tf.VariableSynchronization.ON_READ


def _wire_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which values of `dtype` are sent."""
    return tf.float32 if dtype.size < tf.float32.size else dtype


def deduplicate_rows_before_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes a single-replica optimizer sum the rows of each id before the update (`gradient_lists.deduplicate_rows`), in place."""
    if "apply" not in vars(optimizer):
        apply = optimizer.apply

        def apply_sums(grads: Sequence[Gradient], trainable_variables: Variables | None = None) -> None:
            variables = trainable_variables
            if variables is None:
                variables = keras_internals.trainable_variables(optimizer)
            grads = gradient_lists.deduplicate_rows(grads)
            if worker_tables.clips(optimizer, variables):
                worker_tables.take_over_clip(optimizer, variables)
                grads = worker_tables.clip(optimizer, grads, variables)
            apply(gradient_lists.with_divisible_rows(grads), trainable_variables)

        optimizer.apply = apply_sums
