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
from tfdist.compat import keras_internals, laid_out, optimizer_search, tf_internals, unsupported
from tfdist.compression.base import NONE, Compressor
from tfdist.config import CompressionConfig
from tfdist.errors import ConfigError
from tfdist.feature import Feature
from tfdist.gradients import gradient_lists, worker_tables
from tfdist.gradients.clipping import needs_whole_norms
from tfdist.gradients.conditions import cond_of
from tfdist.gradients.reduction import Reduction
from tfdist.gradients.summing import mark_gradients_ready, sum_in_step
from tfdist.gradients.tape_sums import GradientsUsedError
from tfdist.gradients.update import IfFinite, Update, deduplicate_rows_before_update
from tfdist.gradients.way import Batch, Each, End, Stage, run
from tfdist.gradients.whole import FindFinite
from tfdist.replicas import step_context


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
    update = Update(leaf, scaled, clip_after_reduce)
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
        if several or asked or overwrites or needs_whole_norms(leaf, model.trainable_variables):
            compressor = engine.compressor if several and not self.strategy.trains_alone else None
            distribute_optimizer(optimizer, compressor, clip_after_reduce=True)
        else:
            deduplicate_rows_before_update(optimizer)


class _ReduceThenApply:
    """The `apply` of the outermost optimizer, which reduces gradients and then calls Keras' `apply`."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, update: Update):
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
            return self._run(grads, trainable_variables)
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
                return self._run(grads, trainable_variables, are_sums=True)
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
            self._run(grads, trainable_variables)
        finally:
            step.is_applying = False
            step.gathered.clear()  # the update has changed these variables

    def _iterations(self) -> tf.Tensor:
        return tf.cast(self._optimizer.iterations, tf.int64)

    def _run(self, grads: Sequence[Gradient], trainable_variables: Variables | None, are_sums: bool = False) -> None:
        self._check_built()
        context = tf.distribute.get_replica_context()
        if context and not are_sums:
            mark_gradients_ready(context, grads)
        variables = self._variables(trainable_variables)
        stages = self._stages(context, grads, variables, are_sums)
        run([*stages, End(self._apply)], Batch(grads, variables), switches=context is not None)

    def _stages(self, context: Any, grads: Sequence[Gradient], variables: Variables, are_sums: bool) -> list[Stage]:
        """Returns the way of gradients to Keras' `apply`; the optimizer's `Update` is the rest of it."""
        update = self._update
        decides = bool(update.scaled or update.finite)
        # Rows of one id are added first, so that fewer rows are sent.
        stages: list[Stage] = [Each(lambda grads, _: gradient_lists.deduplicate_rows(grads))]
        if worker_tables.own_indices(grads, variables):
            worker_tables.check(update.leaf, update.clip is not None)
        if update.clip and not update.accumulates:
            clip = update.clip
            stages.append(Each(lambda grads, _: clip.clipped(grads, self._scale())))
        if context and not (update.accumulates or are_sums):
            stages.append(Each(gradient_lists.with_static_shapes))  # by which buckets are filled
            # Residuals of a compressor are kept unscaled.
            stages += update.sum_stages(lambda: self._optimizer.dynamic_scale if update.scaled else None)
        compressed = bool(update.reduction) and not update.accumulates
        if context and (decides or compressed):
            # Gradients that are accumulated are summed once per update, but whether a step counts is decided now.
            stages.append(FindFinite(differ=update.accumulates or (update.scatters and not are_sums)))
        if context and update.finite:
            stages.append(update.finite)
        elif context and compressed and not update.scaled:
            stages.append(IfFinite())  # `_apply` skips those with a loss scale
        return stages

    def _variables(self, variables: Variables | None) -> Variables:
        """Returns the variables of gradients; None means those of the optimizer."""
        return self._update.variables if variables is None else variables

    def _apply(self, batch: Batch) -> None:
        grads = gradient_lists.with_divisible_rows(batch.grads)
        if batch.finite is not None and self._update.scaled and self._optimizer.built:
            cond = cond_of(tf.distribute.get_strategy())
            keras_internals.apply_scaled(self._optimizer, grads, batch.variables, batch.finite, cond)
        else:
            self._keras_apply(grads, batch.variables)

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


def number_of_update(model: keras.Model) -> tf.Tensor:
    """Returns the number of updates by the first optimizer of a model."""
    optimizers = optimizer_search.optimizers(model)
    return tf.cast(optimizers[0].iterations, tf.int64) if optimizers else tf.zeros([], tf.int64)


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
    update: Update,
    variables: Variables,
) -> None:
    """Replaces `build` of an optimizer with a compressor; also creates the compression state."""
    build(variables)
    create_compression_state(optimizer, update, variables)


def create_compression_state(optimizer: keras.optimizers.Optimizer, update: Update, variables: Variables) -> None:
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


def update_of(optimizer: keras.optimizers.Optimizer) -> Update | None:
    """Returns the `Update` that `distribute_optimizer` installed in an optimizer, or None."""
    update = keras_internals.update_method(optimizer)
    return update if isinstance(update, Update) else None


def _reduces_first(optimizer: keras.optimizers.Optimizer) -> bool:
    return isinstance(optimizer.apply, _ReduceThenApply)
