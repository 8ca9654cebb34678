"""Reduces gradients once over all replicas, before the optimizer looks at them.

Stock Keras 3 reduces last, in `_all_reduce_sum_gradients`: whatever it decides before that (is the gradient finite? does
it need clipping? is it time to update?) it decides on each replica's own gradient. With the reduction first, every
replica decides the same, on the gradient that one process would have.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import compression as compression_lib
from tfdist.collectives.factory import check_strategy
from tfdist.compat import keras_internals, tf_internals
from tfdist.compat.unsupported import DISTRIBUTED, UNBUILT
from tfdist.compression.base import Compressor
from tfdist.config import CompressionConfig
from tfdist.errors import ConfigError
from tfdist.gradients import gradient_lists
from tfdist.gradients.reduction import Reduction, bucketed_all_reduce, gather_rows_in_process, uses_bucketed_all_reduce
from tfdist.gradients.replica_context import replica
from tfdist.gradients.update import AccumulatingUpdate

_COMPRESSOR = "_tfdist_compressor"
_STATE = "_tfdist_compression"


def distribute_optimizer(
    optimizer: keras.optimizers.Optimizer,
    compression: str | CompressionConfig | Compressor | None = None,
    clip_after_reduce: bool = False,
) -> keras.optimizers.Optimizer:
    """Makes `optimizer` reduce first. In place; its class stays, so that it is saved as the plain optimizer it is.

    - `LossScaleOptimizer` looks for inf and NaN in the reduced gradient, so that all replicas skip a step or none.
    - `gradient_accumulation_steps` adds up on each replica and reduces once per update.
    - `ema_overwrite_frequency` works: its condition stands outside of the replicas.

    Args:
        optimizer: Created in the strategy's scope. Distributing it again changes nothing.
        compression: What sums gradients with fewer bytes: a name, a `CompressionConfig` or a compressor (see
            `tfdist.compression.create`); None means that they are summed as they are.
        clip_after_reduce: Whether `clipnorm`, `global_clipnorm` and `clipvalue` clip the reduced gradient, as one process
            would, which is what the Trainer asks for (tensorflow#33929). False keeps Keras' order: each replica clips its
            own share of the gradient, before the sum.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: There is no such compressor, an argument of its is out of range, or the strategy has no compression.
    """
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    leaf = optimizer.inner_optimizer if scaled else optimizer
    compressor, before = compression_lib.create(compression), getattr(leaf, _COMPRESSOR, None)
    if getattr(leaf, DISTRIBUTED, False) or getattr(optimizer, DISTRIBUTED, False):
        if compressor not in (None, before):
            raise ConfigError(
                f"compression {compressor.description} comes too late: this {type(leaf).__name__} already has "
                f"{before.description if before else 'none'}; compile the model with a new optimizer."
            )
        compressor = before  # as when Keras has put a LossScaleOptimizer around it
    if getattr(optimizer, DISTRIBUTED, False):
        return optimizer
    for name in ("apply", "build", "scale_loss", DISTRIBUTED):
        vars(leaf).pop(name, None)  # it was used without its LossScaleOptimizer before, or with another one
    keras_internals.restore_optimizer_methods(leaf)
    setattr(optimizer, DISTRIBUTED, True)
    setattr(leaf, _COMPRESSOR, compressor)
    update = AccumulatingUpdate(leaf, scaled, clip_after_reduce)
    if compressor is not None:
        if tf.distribute.has_strategy():
            check_strategy(tf.distribute.get_strategy())
        _warn_if_adaptive(leaf, compressor)
        update.compressor = compressor
        leaf.build = _BuildCompressionState(leaf, compressor, update)
    keras_internals.replace_reduction(leaf, list)
    if scaled:
        leaf.apply = _ApplyReduced(leaf)
    keras_internals.replace_update(leaf, update)
    optimizer.apply = _ReduceThenApply(optimizer, update)
    optimizer.scale_loss = _WeightedLoss(optimizer)
    return optimizer


def get_reduction(optimizer: keras.optimizers.Optimizer) -> Reduction | None:
    """Returns what sums an optimizer's gradients through a compressor, once it is built; None without one."""
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), _STATE, None)


def _replicas() -> int:
    """Returns the number of replicas, which the strategy itself hides within a step (`as_one_replica`)."""
    return tf_internals.num_replicas(tf.distribute.get_strategy())


def _warn_if_adaptive(optimizer: keras.optimizers.Optimizer, compressor: Compressor) -> None:
    kinds = [keras.optimizers.Adam, keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta]
    kinds += [keras.optimizers.Adamax, keras.optimizers.Nadam, keras.optimizers.Lamb]
    if not compressor.supports_adaptive_optimizers and isinstance(optimizer, tuple(kinds)):
        warnings.warn(
            f"{type(optimizer).__name__} divides by what gradients have been, which {compressor.description} makes rare and "
            "large: it may train worse, or not at all. Use compression 'powersgd' or 'int8' with it, or SGD with momentum.",
            stacklevel=3,
        )


class _WeightedLoss:
    """`scale_loss`, which Keras calls before it computes gradients."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._optimizer = optimizer
        self._scale_loss = optimizer.scale_loss

    def __call__(self, loss: Any) -> Any:
        loss = self._scale_loss(loss)
        if getattr(replica, "scales", None) is not self._optimizer or replica.share is None:
            return loss
        if loss.shape.rank:  # the gradient of a vector is that of its sum
            return loss
        return loss * gradient_lists.factor(replica.share, loss.dtype)


class _ApplyReduced:
    """`apply` of an optimizer that a `LossScaleOptimizer` wraps: the wrapper reduces, and alone may call it in a step."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._optimizer = optimizer
        self._apply = optimizer.apply

    def __call__(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if getattr(replica, "in_step", False) and not getattr(replica, "applying", False):
            raise ConfigError(
                f"The training step applies {type(self._optimizer).__name__}, which a LossScaleOptimizer wraps, so that "
                "its gradients are neither reduced nor unscaled: apply the LossScaleOptimizer (model.optimizer)."
            )
        self._apply(grads, trainable_variables)


class _ReduceThenApply:
    """`apply` of the outermost optimizer: reduces, then goes on as Keras does."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, update: AccumulatingUpdate):
        self._optimizer = optimizer
        self._keras_apply = optimizer.apply
        self._update = update

    def __call__(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if (share := getattr(replica, "share", None)) is not None:
            grads = (
                gradient_lists.zero_if_no_examples(grads, share)
                if replica.scales is self._optimizer
                else gradient_lists.scale_no_nan(grads, share)
            )
        if (captured := getattr(replica, "captured", None)) is not None:
            captured.append((grads, trainable_variables))
            return
        replica.applying = True
        try:
            self._reduce(grads, trainable_variables)
        finally:
            replica.applying = False

    def _reduce(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> None:
        self._check_built()
        grads = gradient_lists.deduplicate_rows(grads)  # fewer travel
        if not self._update.accumulates:
            grads = self._update.clip_local(grads, self._scale())
        context = tf.distribute.get_replica_context()
        if context and self._update.reduction and not self._update.accumulates:
            variables = self._update.variables if trainable_variables is None else trainable_variables
            grads = gradient_lists.with_static_shapes(grads, variables)
            present = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
            if present:
                mine, variables = zip(*present, strict=True)
                context.merge_call(functools.partial(self._compressed, variables=variables), args=(list(mine),))
                return
        if not self._update.accumulates:
            grads = self._summed(context, grads, trainable_variables)
        elif self._update.scaled:
            grads = gradient_lists.propagate_non_finite(grads)
        self._apply(grads, trainable_variables)

    def _apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None) -> None:
        self._keras_apply(gradient_lists.with_divisible_rows(grads), trainable_variables)

    def _check_built(self) -> None:
        if self._optimizer.built:
            return
        known = not getattr(replica, "in_step", False) or self._optimizer is replica.compiled
        if not known and _replicas() > 1:  # a backup would not hold its variables
            raise ConfigError(UNBUILT.format(type(self._optimizer).__name__))
        if self._update.compressor or (self._update.scaled and not tf.executing_eagerly()):
            kind = "that compresses" if self._update.compressor else "with a loss scale"
            raise ConfigError(f"An optimizer {kind} must be built first: optimizer.build(model.trainable_variables).")

    def _scale(self) -> Any:
        """Returns by what the gradients are multiplied until Keras' `apply` divides them."""
        if not self._update.scaled:
            return self._optimizer.loss_scale_factor or 1.0
        return self._optimizer.dynamic_scale if self._optimizer.built else self._optimizer.initial_scale

    def _summed(
        self,
        context: tf.distribute.ReplicaContext | None,
        grads: Sequence[Any],
        variables: Sequence[Any] | None,
    ) -> list[Any]:
        """Returns the gradients, None where there is none, summed over all replicas."""
        if not (context and uses_bucketed_all_reduce(context.strategy)):
            rows = [place for place, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
            if not (context and rows and isinstance(context.strategy, tf.distribute.MirroredStrategy)):
                return gradient_lists.all_reduce(tf.distribute.ReduceOp.SUM, grads)
            dense = [None if place in rows else grad for place, grad in enumerate(grads)]
            reduced = gradient_lists.all_reduce(tf.distribute.ReduceOp.SUM, dense)
            gathered = context.merge_call(gather_rows_in_process, args=([grads[place] for place in rows],))
            for place, total in zip(rows, gathered, strict=True):
                reduced[place] = total
            return reduced
        grads = gradient_lists.with_static_shapes(grads, self._update.variables if variables is None else variables)
        places = [place for place, grad in enumerate(grads) if grad is not None]
        present = [grads[place] for place in places]
        step = tf.cast(self._optimizer.iterations, tf.int64)
        totals = (
            context.merge_call(functools.partial(bucketed_all_reduce, step=step), args=(present,)) if present else []
        )
        summed = dict(zip(places, totals, strict=True))
        return [summed.get(place) for place in range(len(grads))]

    def _compressed(self, strategy: tf.distribute.Strategy, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Sums through the compressor, and skips the step where a gradient is not finite."""
        scale = self._optimizer.dynamic_scale if self._update.scaled else None  # errors are fed back without it
        grads, finite = self._update.reduce(grads, variables, scale)

        def each() -> None:
            strategy.extended.call_for_each_replica(self._apply, args=(grads, variables))

        if self._update.scaled:  # it sees to that itself
            each()
        else:
            tf.cond(finite, each, lambda: None)


class _BuildCompressionState:
    """`build` of the optimizer: makes the compressor's state, too."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, compression: Compressor, update: AccumulatingUpdate):
        self._optimizer = optimizer
        self._build = optimizer.build
        self._compression = compression
        self._update = update
        if optimizer.built:
            self._make(update.variables)

    def __call__(self, variables: Sequence[Any]) -> None:
        self._build(variables)
        self._make(variables)

    def _make(self, variables: Sequence[Any]) -> None:
        strategy = variables and getattr(variables[0].value, "distribute_strategy", None)
        if not strategy or strategy.num_replicas_in_sync == 1:
            return  # it has nobody to send to
        self._update.reduction = reduction = Reduction(self._compression, variables)
        setattr(self._optimizer, _STATE, reduction)  # where a backup looks
