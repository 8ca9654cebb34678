"""The reduction of gradients over all replicas before the optimizer uses them.

Stock Keras 3 reduces last, in `_all_reduce_sum_gradients`. Earlier decisions (is the gradient finite? does it need
clipping? is it time to update?) depend on each replica's own gradient. With the reduction first, all replicas decide
the same, on the gradient that one process would have.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import compression as compression_lib
from tfdist.aliases import Gradient, Structure, Variables
from tfdist.collectives.communicator import check_compresses
from tfdist.collectives.own_time import own_time_of
from tfdist.compat import keras_internals, laid_out, optimizer_search, tf_internals, unsupported
from tfdist.compression.base import NONE, Compressor
from tfdist.config import CompressionConfig
from tfdist.config.strategy_traits import traits_of
from tfdist.errors import ConfigError
from tfdist.feature import Feature
from tfdist.gradients import gradient_lists, worker_tables
from tfdist.gradients.conditions import cond_of
from tfdist.gradients.reduction import Reduction, bucketed_all_reduce, gather_rows_in_process, uses_bucketed_all_reduce
from tfdist.gradients.sharded_update import ShardedUpdate
from tfdist.gradients.tape_sums import GradientsUsedError
from tfdist.gradients.update import AccumulatingUpdate, deduplicate_rows_before_update
from tfdist.replicas import step_context
from tfdist.replicas.step_context import StepContext


def distribute_optimizer(
    optimizer: keras.optimizers.Optimizer,
    compression: str | CompressionConfig | Compressor | None = None,
    clip_after_reduce: bool = False,
) -> keras.optimizers.Optimizer:
    """Makes `optimizer` reduce gradients before it uses them, in place. Its class stays, so that it is saved as a Keras optimizer.

    - `LossScaleOptimizer` looks for inf and NaN in the reduced gradient, so that all replicas skip a step or none.
    - `gradient_accumulation_steps` sums gradients on each replica and reduces them once per update.
    - `ema_overwrite_frequency` works: its condition is evaluated in cross-replica context.

    Args:
        optimizer: Created in the strategy's scope. Distributing it again changes nothing.
        compression: A name, a `CompressionConfig` or a compressor (see
            `tfdist.compression.create`); None means that gradients are summed uncompressed.
        clip_after_reduce: Whether `clipnorm`, `global_clipnorm` and `clipvalue` clip the reduced gradient, as one process
            would, as the Trainer does (tensorflow#33929). False keeps Keras' order: each replica clips its
            own share of the gradient, before the sum.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: The compressor is unknown, one of its arguments is out of range, or the strategy cannot compress.

    Examples:
        >>> import keras, tfdist
        >>> strategy = tfdist.create_strategy("mirrored")
        >>> with strategy.scope():
        ...     optimizer = tfdist.distribute_optimizer(keras.optimizers.SGD(0.1), compression="bf16")
        >>> round(float(optimizer.learning_rate), 3)
        0.1
    """
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    leaf = optimizer.inner_optimizer if scaled else optimizer
    compressor = compression_lib.create(compression)
    if _reduces_first(leaf) or _reduces_first(optimizer):
        previous = get_compressor(leaf)
        if compressor not in (None, previous):
            description = previous.description if previous else "none"
            raise ConfigError(
                f"compression {compressor.description} comes too late: this {type(leaf).__name__} already has "
                f"{description}; compile the model with a new optimizer."
            )
        compressor = previous  # Keras may have wrapped `optimizer` in a LossScaleOptimizer since
    if _reduces_first(optimizer):
        return optimizer
    # The leaf may have been distributed before, without this LossScaleOptimizer or within another one: start from Keras' methods.
    for name in ("apply", "build", "scale_loss"):
        vars(leaf).pop(name, None)
    keras_internals.restore_optimizer_methods(leaf)
    update = AccumulatingUpdate(leaf, scaled, clip_after_reduce)
    if compressor is not None:
        if tf.distribute.has_strategy():
            check_compresses(tf.distribute.get_strategy())
        _warn_if_adaptive(leaf, compressor)
        update.compressor = compressor
        if leaf.built:
            create_compression_state(leaf, update, update.variables)
        leaf.build = functools.partial(_build_with_compression, leaf.build, leaf, update)
    keras_internals.replace_reduction(leaf, list)  # Keras would reduce again, in its update
    if scaled:
        leaf.apply = functools.partial(_apply_reduced, leaf.apply, leaf)
    keras_internals.replace_update(leaf, update)
    optimizer.apply = _ReduceThenApply(optimizer, update)
    optimizer.scale_loss = functools.partial(_scale_and_weigh_loss, optimizer.scale_loss, optimizer)
    return optimizer


class GradientSums(Feature):
    """The sum of gradients over all replicas, before optimizers use them."""

    def attach(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> None:
        several = self.strategy.num_replicas_in_sync > 1
        leaf = getattr(optimizer, "inner_optimizer", optimizer)
        # Keras overwrites weights by their averages in a condition, in which one replica may not call `merge_call` either.
        overwrites = leaf.use_ema and leaf.ema_overwrite_frequency
        asked = any(feature.needs_update(model, optimizer, engine) for feature in self.strategy.features)
        if several or asked or overwrites or worker_tables.clips(leaf, model.trainable_variables):
            compressor = engine.compressor if several and not self.strategy.trains_alone else None
            distribute_optimizer(optimizer, compressor, clip_after_reduce=True)
        else:
            deduplicate_rows_before_update(optimizer)


class _ReduceThenApply:
    """The `apply` of the outermost optimizer, which reduces gradients and then calls Keras' `apply`."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, update: AccumulatingUpdate):
        self._optimizer = optimizer
        self._keras_apply = optimizer.apply
        self._update = self.update = update

    def __call__(self, grads: Sequence[Gradient], trainable_variables: Variables | None = None) -> None:
        if trainable_variables is not None:
            trainable_variables = laid_out.pieces(trainable_variables)
        with unsupported.explaining_branches():
            self._apply_in_step(grads, trainable_variables)

    def _apply_in_step(self, grads: Sequence[Gradient], trainable_variables: Variables | None) -> None:
        step = step_context.current()
        if step is None:
            return self._reduce(grads, trainable_variables)
        if step.tapes is not None:
            step.tapes.check_summed_once(grads)
        if step.tapes is not None and step.tapes.sums:
            step.tapes.check_tables()
            grads, variables = list(grads), self._variables(trainable_variables)
            local = step.tapes.unsummed(grads)
            own = [grads[index] for index in local]
            summed = sum_in_step(step, own, [variables[index] for index in local], self._iterations()) if local else []
            totals = dict(zip(local, summed, strict=True))
            grads = step.tapes.original_rows([totals.get(index, grad) for index, grad in enumerate(grads)])
            step.is_applying = True
            try:
                return self._reduce(grads, trainable_variables, are_sums=True)
            finally:
                step.is_applying = False
        if step.tapes is not None:
            if step.tapes.is_used():
                raise GradientsUsedError  # before more is traced in vain
            grads = step.tapes.originals(grads)
        if step.gradient_weight is not None:
            # Keras' own step has weighted the loss (`_scale_and_weigh_loss`); a custom step's gradients are weighted here.
            is_weighted = step.weighs_loss and step.optimizer is self._optimizer
            weigh = gradient_lists.zero_if_no_examples if is_weighted else gradient_lists.scale_no_nan
            grads = worker_tables.map_others(
                functools.partial(weigh, share=step.gradient_weight), grads, self._variables(trainable_variables)
            )
        if step.deferred is not None:
            return step.deferred.append((grads, trainable_variables))
        step.is_applying = True
        try:
            self._reduce(grads, trainable_variables)
        finally:
            step.is_applying = False
            step.gathered.clear()  # the update has changed these variables

    def _iterations(self) -> tf.Tensor:
        return tf.cast(self._optimizer.iterations, tf.int64)

    def _reduce(self, grads: Sequence[Gradient], trainable_variables: Variables | None, are_sums: bool = False) -> None:
        self._check_built()
        context = tf.distribute.get_replica_context()
        if context and not are_sums:
            _measure_own_time(context, grads)
        grads = gradient_lists.deduplicate_rows(grads)  # so that fewer rows are sent
        variables = self._variables(trainable_variables)
        own = worker_tables.own_indices(grads, variables)
        if own:
            worker_tables.check(self._update.leaf, self._update.clips_local)
            if self._update.scaled or self._update.finite or self._update.reduction:
                grads = worker_tables.agree_on_finite(grads, own)
        if self._update.accumulates:
            # The sums are reduced once per update, but whether a step counts is decided now, by all replicas together.
            if self._update.scaled or self._update.finite:
                grads = gradient_lists.propagate_non_finite(grads)
        else:
            grads = self._update.clip_local(grads, self._scale())
            scattering = self._update.scattering
            if are_sums:
                grads = self._update.clip_tables(grads, variables, self._scale())
            elif context and scattering:
                if self._merge(context, functools.partial(self._scattered, scattering), grads, trainable_variables):
                    return
            elif self._update.trains_alone:
                pass
            elif not (context and self._update.reduction):
                summed = functools.partial(_summed, context, variables=variables, step=self._iterations())
                grads = worker_tables.map_others(summed, grads, variables)
                grads = self._update.clip_tables(grads, variables, self._scale())
            elif self._merge(context, self._compressed, grads, trainable_variables):
                return
        if not (context and self._update.finite and self._merge(context, self._if_finite, grads, trainable_variables)):
            self._apply(grads, trainable_variables)

    def _merge(
        self,
        context: tf.distribute.ReplicaContext,
        function: Callable[..., None],
        grads: Sequence[Gradient],
        variables: Variables | None,
    ) -> bool:
        """Calls a function with the gradients of all replicas and their variables; returns False if all gradients are None."""
        variables = self._variables(variables)
        grads = gradient_lists.with_static_shapes(grads, variables)
        present = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
        if present:
            present_grads, variables = zip(*present, strict=True)
            context.merge_call(functools.partial(function, variables=variables), args=(list(present_grads),))
        return bool(present)

    def _variables(self, variables: Variables | None) -> Variables:
        """Returns the variables of gradients; None means those of the optimizer."""
        return self._update.variables if variables is None else variables

    def _apply(self, grads: Sequence[Gradient], trainable_variables: Variables | None) -> None:
        grads = gradient_lists.with_divisible_rows(grads)
        context = tf.distribute.get_replica_context()
        ordered = context and traits_of(context.strategy).compresses and self._update.scaled and self._optimizer.built
        if ordered:
            keras_internals.apply_scaled(self._optimizer, grads, trainable_variables, cond_of(context.strategy))
        else:
            self._keras_apply(grads, trainable_variables)

    def _check_built(self) -> None:
        if self._optimizer.built:
            return
        step = step_context.current()
        known = step is None or self._optimizer is step.optimizer
        # A backup would not contain the optimizer's variables.
        if not known and tf_internals.num_replicas(tf.distribute.get_strategy()) > 1:
            raise ConfigError(unsupported.UNBUILT.format(type(self._optimizer).__name__))
        if self._update.compressor:
            kind = "that compresses"
        elif self._update.trains_alone:
            kind = "of a worker that trains alone (sync_every)"
        elif tf.executing_eagerly():
            return
        elif self._update.scaled:
            kind = "with a loss scale"
        elif self._update.finite:
            kind = "with a nan_policy"
        else:
            return
        raise ConfigError(f"An optimizer {kind} must be built first: optimizer.build(model.trainable_variables).")

    def _scale(self) -> tf.Tensor | float:
        """Returns the loss scale, by which gradients are multiplied until Keras' `apply` divides them."""
        if not self._update.scaled:
            return self._optimizer.loss_scale_factor or 1.0
        return self._optimizer.dynamic_scale if self._optimizer.built else self._optimizer.initial_scale

    def _compressed(self, strategy: tf.distribute.Strategy, grads: Sequence[Gradient], variables: Variables) -> None:
        """Sums gradients through the compressor; skips the update if a gradient is not finite."""
        scale = self._optimizer.dynamic_scale if self._update.scaled else None  # residuals are kept unscaled
        totals, finite = self._update.reduce(grads, variables, scale)
        if worker_tables.clips(self._update.leaf, self._update.variables):
            clip = functools.partial(self._update.clip_tables, scale=self._scale())
            totals = strategy.extended.call_for_each_replica(clip, args=(totals, variables))
        self._if_finite(strategy, totals, variables, finite)

    def _scattered(
        self,
        sharded: ShardedUpdate,
        strategy: tf.distribute.Strategy,
        grads: Sequence[Gradient],
        variables: Variables,
    ) -> None:
        """Gives each process its pieces of the gradients' sum, and applies the update; skips it if a gradient is not finite."""
        pieces = sharded.reduce_scatter(grads, variables)
        if not (self._update.finite or self._update.scaled):
            strategy.extended.call_for_each_replica(self._apply, args=(pieces, variables))
            return
        finite = sharded.all_finite(pieces)
        if self._update.scaled:
            # `LossScaleOptimizer` tests the pieces of its process.
            pieces = gradient_lists.scale(pieces, tf.where(finite, 1.0, float("nan")))
        self._if_finite(strategy, pieces, variables, finite)

    def _if_finite(
        self,
        strategy: tf.distribute.Strategy,
        grads: Sequence[Gradient],
        variables: Variables,
        finite: tf.Tensor | None = None,
    ) -> None:
        """Applies the update if all reduced gradients are finite."""

        def apply() -> None:
            strategy.extended.call_for_each_replica(self._apply, args=(grads, variables))

        if self._update.finite:
            self._update.finite.make(strategy, apply, grads, finite)
        elif self._update.scaled:  # LossScaleOptimizer itself skips non-finite updates
            apply()
        else:
            cond_of(strategy)(finite, apply, lambda: None)


def _summed(
    context: tf.distribute.ReplicaContext | None,
    grads: list[Gradient],
    variables: Variables,
    step: tf.Tensor,
) -> list[Gradient]:
    """Returns the sums of the gradients over all replicas; None stays None."""
    if context and uses_bucketed_all_reduce(context.strategy):
        grads = gradient_lists.with_static_shapes(grads, variables)
        present = [grad for grad in grads if grad is not None]
        if not present:
            return grads
        totals = iter(context.merge_call(functools.partial(bucketed_all_reduce, step=step), args=(present,)))
        return [None if grad is None else next(totals) for grad in grads]
    sparse = [index for index, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
    if not (context and sparse and traits_of(context.strategy).mirrors_in_process):
        return gradient_lists.all_reduce(tf.distribute.ReduceOp.SUM, grads)
    reduced = list(grads)
    for index in sparse:
        reduced[index] = None
    reduced = gradient_lists.all_reduce(tf.distribute.ReduceOp.SUM, reduced)
    gathered = context.merge_call(gather_rows_in_process, args=([grads[index] for index in sparse],))
    for index, total in zip(sparse, gathered, strict=True):
        reduced[index] = total
    return reduced


def sum_in_step(
    step: StepContext, grads: Sequence[Gradient], variables: Variables, number: tf.Tensor
) -> list[Gradient]:
    """Returns the sums over all replicas of a step's gradients, each weighted by its replica's share. Within a replica.

    `number` is that of the update.
    """
    context = tf.distribute.get_replica_context()
    if step.gradient_weight is not None:
        grads = gradient_lists.scale_no_nan(grads, step.gradient_weight)
    _measure_own_time(context, grads)
    return _summed(context, list(grads), variables, number)


def number_of_update(model: keras.Model) -> tf.Tensor:
    """Returns the number of updates by the first optimizer of a model."""
    optimizers = optimizer_search.optimizers(model)
    return tf.cast(optimizers[0].iterations, tf.int64) if optimizers else tf.zeros([], tf.int64)


def _measure_own_time(context: tf.distribute.ReplicaContext, grads: Sequence[Gradient]) -> None:
    own_time = own_time_of(context.strategy)
    if own_time and own_time.is_measuring:
        context.merge_call(own_time.on_gradients, args=([grad for grad in grads if grad is not None],))


def _apply_reduced(
    apply: Callable[..., None],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Gradient],
    trainable_variables: Variables | None = None,
) -> None:
    """Replaces `apply` of an optimizer within a `LossScaleOptimizer`, which reduces; in a step only the wrapper may call it."""
    step = step_context.current()
    if step is not None and not step.is_applying:
        raise ConfigError(
            f"The training step applies {type(optimizer).__name__}, which a LossScaleOptimizer wraps, so that "
            "its gradients are neither reduced nor unscaled: apply the LossScaleOptimizer (model.optimizer)."
        )
    apply(grads, trainable_variables)


def _scale_and_weigh_loss(
    scale_loss: Callable[[Structure], Structure], optimizer: keras.optimizers.Optimizer, loss: Structure
) -> Structure:
    """Replaces `scale_loss`, which Keras calls before it computes gradients; also multiplies by the replica's weight."""
    loss = scale_loss(loss)
    step = step_context.current()
    if step is None or not step.weighs_loss or step.optimizer is not optimizer:
        return loss
    weight = step.gradient_weight
    if weight is None:
        return loss
    if not loss.shape.rank:
        return loss * gradient_lists.factor(weight, loss.dtype)
    if not tf.is_tensor(weight):
        return loss
    # The gradient of a vector is the gradient of its sum. A replica without examples must not send a gradient through the
    # moments of a synchronized BatchNormalization.
    return tf.math.multiply_no_nan(loss, tf.cast(weight > 0, loss.dtype))


def _build_with_compression(
    build: Callable[..., None],
    optimizer: keras.optimizers.Optimizer,
    update: AccumulatingUpdate,
    variables: Variables,
) -> None:
    """Replaces `build` of an optimizer with a compressor; also creates the compression state."""
    build(variables)
    create_compression_state(optimizer, update, variables)


def create_compression_state(
    optimizer: keras.optimizers.Optimizer, update: AccumulatingUpdate, variables: Variables
) -> None:
    """Creates the compressor's state beside the optimizer's: TensorFlow tracks it, so that checkpoints and backups hold its variables."""
    strategy = variables and getattr(variables[0].value, "distribute_strategy", None)
    if update.compressor and strategy and strategy.num_replicas_in_sync > 1:  # a single replica sends nothing
        update.reduction = optimizer.compression_state = Reduction(update.compressor, variables)


def _warn_if_adaptive(optimizer: keras.optimizers.Optimizer, compressor: Compressor) -> None:
    """Warns if an adaptive optimizer gets a compressor that does not support it."""
    kinds = [keras.optimizers.Adam, keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta]
    kinds += [keras.optimizers.Adamax, keras.optimizers.Nadam, keras.optimizers.Lamb]
    if not compressor.supports_adaptive_optimizers and isinstance(optimizer, tuple(kinds)):
        warnings.warn(
            f"{type(optimizer).__name__} normalizes by past gradients, which {compressor.description} makes sparse and "
            "large: it may train worse, or not at all. Use compression 'powersgd' or 'int8' with it, or SGD with momentum.",
            stacklevel=3,
        )


def get_reduction(optimizer: keras.optimizers.Optimizer) -> Reduction | None:
    """Returns the compressed reduction of an optimizer's gradients; None before `build`, or without a compressor."""
    update = update_of(getattr(optimizer, "inner_optimizer", optimizer))
    if update is None:
        return None
    if not update.exchange:
        return update.reduction
    reduction: Reduction = update.exchange.reduction
    return None if reduction.compressor == NONE else reduction


def get_compressor(optimizer: keras.optimizers.Optimizer) -> Compressor | None:
    """Returns the compressor of an optimizer's gradients, also before `build`; None without one."""
    update = update_of(getattr(optimizer, "inner_optimizer", optimizer))
    if update is None or not update.exchange:
        return None if update is None else update.compressor
    reduction = get_reduction(optimizer)
    return reduction.compressor if reduction else None


def update_of(optimizer: keras.optimizers.Optimizer) -> AccumulatingUpdate | None:
    """Returns the `AccumulatingUpdate` that `distribute_optimizer` installed in an optimizer, or None."""
    update = keras_internals.update_method(optimizer)
    return update if isinstance(update, AccumulatingUpdate) else None


def _reduces_first(optimizer: keras.optimizers.Optimizer) -> bool:
    return isinstance(optimizer.apply, _ReduceThenApply)
