"""The update of variables with reduced gradients: accumulation, clipping, moving averages, equal bits on all workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.collectives import hardware
from tfdist.collectives.communicator import communicator_for
from tfdist.collectives.requests import AllReduce, RankContext
from tfdist.compat import keras_internals
from tfdist.compression.base import Compressor
from tfdist.gradients import gradient_lists
from tfdist.gradients.accumulation import Accumulate
from tfdist.gradients.clipping import ClipByWholeNorms, ClipOnReplica
from tfdist.gradients.conditions import cond_of
from tfdist.gradients.reduction import Reduction, uses_bucketed_all_reduce
from tfdist.gradients.sharded_update import ELEMENTWISE
from tfdist.gradients.summing import CompressedSum, Sum
from tfdist.gradients.way import Batch, Each, Rest, Stage, run
from tfdist.layers.table import common
from tfdist.strategy import as_ours

_BROADCAST_LANE = -3  # a lane that gradients do not use


class Update:
    """The replacement of an optimizer's `_backend_apply_gradients`: the second half of the way of its gradients.

    Keras calls it with the gradients of `_ReduceThenApply`, the first half, which are unscaled by then. Its stages run Keras' conditional
    updates in cross-replica context, where the variables of all replicas can be assigned.

    Attributes:
        leaf: The optimizer.
        scaled: Whether a `LossScaleOptimizer` wraps it.
        clip: Clips on each replica, before the sum; None if the sum is clipped.
        compressor: The compressor of the gradients, or None.
        reduction: The sum through the compressor; None until the optimizer is built.
        exchange: The `LocalSteps` of a worker that trains alone; else None.
        finite: The `FiniteUpdates`, if updates that are not finite are skipped; else None.
        takes_sums: Whether the gradients to apply are sums over all replicas.
        parts: The stages by which each process updates its part of the variables; None if it updates all.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, scaled: bool, clips_after_reduce: bool):
        self.leaf = optimizer
        self._keras_update = keras_internals.update_method(optimizer)
        self.scaled = scaled
        self.compressor: Compressor | None = None
        self.reduction: Reduction | None = None
        self.exchange: Any = None
        self.finite: Any = None
        self.takes_sums = False
        self.parts: Any = None
        # An optimizer that overrides `apply` must receive what one process would: each step's reduced gradient.
        self._reduces_each_step = type(optimizer).apply is not keras.optimizers.Optimizer.apply
        clips_after_reduce = clips_after_reduce or bool(
            optimizer.gradient_accumulation_steps and self._reduces_each_step
        )
        self.clip: ClipOnReplica | None = None
        if not clips_after_reduce and any((optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)):
            self.clip = ClipOnReplica(optimizer, keeps_infinity=scaled)

    @property
    def variables(self) -> Sequence[keras.Variable]:
        """The variables that the optimizer was built with."""
        variables: Sequence[keras.Variable] = keras_internals.trainable_variables(self.leaf)
        return variables

    @property
    def trains_alone(self) -> bool:
        """True if each worker applies its own gradients."""
        ours = as_ours(tf.distribute.get_strategy())
        return bool(ours and ours.trains_alone)

    @property
    def accumulates(self) -> bool:
        """True if the gradients that Keras passes are each replica's own, to be summed once they are accumulated."""
        return bool(self.leaf.gradient_accumulation_steps) and not (self._reduces_each_step or self.takes_sums)

    @property
    def scatters(self) -> bool:
        """True if the stages of the sum leave each process its part of it."""
        return bool(self.parts and self.parts.scatters and not (self.compressor or self.takes_sums))

    def sum_stages(self, scale: Callable[[], tf.Tensor | None] = lambda: None) -> list[Stage]:
        """Returns the stages that sum over all replicas. `scale` is as for `CompressedSum`."""
        if self.trains_alone or self.takes_sums:
            return []
        if self.scatters:
            return [self.parts.scatter()]
        if self.reduction:
            return [CompressedSum(self.reduction, self.leaf, scale)]
        return [Sum(lambda: tf.cast(self.leaf.iterations, tf.int64))]

    def __call__(self, grads: Sequence[Gradient], variables: Variables) -> None:
        if tf.distribute.in_cross_replica_context():
            return self._keras_update(gradient_lists.deduplicate_rows(grads), variables)
        # Rows of several replicas may have the same id.
        stages: list[Stage] = [Each(lambda grads, _: gradient_lists.deduplicate_rows(grads))]
        if self.leaf.use_ema:
            stages.append(MoveAverages(self))
        if self.leaf.gradient_accumulation_steps:
            clip = self.clip.clipped if self.clip else list
            sums_later = self.accumulates and not self.trains_alone
            stages.append(Accumulate(self.leaf, sums_later, clip))
            if sums_later:
                stages += self.sum_stages()
                if self.reduction:
                    stages.append(IfFinite())
        stages.append(Each(self._through_features))
        if self.parts:
            stages.append(self.parts.update(are_parts=self.scatters))
        else:
            stages += [ClipByWholeNorms(self.leaf), Step(self)]
        run(stages, Batch(grads, variables))

    def _through_features(self, grads: Sequence[Gradient], variables: Variables) -> Sequence[Gradient]:
        """Returns reduced gradients as the features of the strategy return them. Within a replica."""
        ours = as_ours(tf.distribute.get_strategy())
        for feature in ours.features if ours else ():
            grads = feature.reduced(self.leaf, grads, variables)
        return grads


class IfFinite(Stage):
    """Drops gradients that are not finite. All ranks have the same sums, and do the same."""

    across = True

    def __call__(self, batch: Batch, rest: Rest) -> None:
        if batch.finite is None:
            return rest(batch)
        return cond_of(tf.distribute.get_strategy())(batch.finite, lambda: rest(batch), lambda: None)


class Step(Stage):
    """Keras' update of variables, which the chief then sends to the others if their processors differ."""

    def __init__(self, update: Update):
        self._update = update

    def __call__(self, batch: Batch, rest: Rest) -> None:
        optimizer = self._update.leaf
        keras_internals.update_variables(optimizer, batch.grads, batch.variables)
        context = tf.distribute.get_replica_context()
        clips = self._update.clip is None
        if not self._update.trains_alone and _may_differ_between_workers(optimizer, context.strategy, clips):
            context.merge_call(_broadcast_update, args=(optimizer,))


class MoveAverages(Stage):
    """The moving averages of the variables, which Keras moves at each step, and writes to the variables now and then.

    It does so in a condition, in which one replica may not assign the variables of all.
    """

    def __init__(self, update: Update):
        self._update = update
        optimizer = update.leaf
        self.across = bool(update.parts or optimizer.ema_overwrite_frequency or optimizer.gradient_accumulation_steps)

    def __call__(self, batch: Batch, rest: Rest) -> None:
        optimizer, parts = self._update.leaf, self._update.parts
        number = tf.convert_to_tensor(optimizer.iterations) + 1
        rest(batch)
        trained = keras_internals.trainable_variables(optimizer)
        move = keras_internals.moving_average_method(optimizer)
        if not self.across:
            return move(trained)
        strategy = tf.distribute.get_strategy()
        if parts:
            parts.move_averages()
        else:
            strategy.extended.call_for_each_replica(move, args=(trained,))
        frequency = optimizer.ema_overwrite_frequency
        if frequency:
            overwrite = keras_internals.overwrite_method(optimizer)
            cond = cond_of(strategy) if parts else tf.cond  # parts are gathered
            cond(number % frequency == 0, lambda: overwrite(trained), lambda: None)
        return None


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
            clipped: list[Batch] = []
            ClipByWholeNorms(optimizer)(Batch(grads, variables), clipped.append)
            apply(gradient_lists.with_divisible_rows(clipped[0].grads), trainable_variables)

        optimizer.apply = apply_sums
