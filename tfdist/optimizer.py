"""Reduces gradients once over all replicas, before the optimizer looks at them.

Stock Keras 3 reduces last, in `_all_reduce_sum_gradients`: whatever it decides before that (is the gradient finite? does
it need clipping? is it time to update?) it decides on each replica's own gradient. With the reduction first, every
replica decides the same, on the gradient that one process would have.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import compression as compression_lib
from tfdist.compression.base import Compressor
from tfdist.config import CompressionConfig
from tfdist.reduction import Reduction, nothing_if_finite, on_values

# The private names of Keras 3's optimizers that this file leans on; tests/test_keras_seams.py watches them.
KERAS_REDUCTION = "_all_reduce_sum_gradients"
KERAS_UPDATE = "_backend_apply_gradients"
KERAS_CLIP = "_clip_gradients"
KERAS_ACCUMULATORS = "_accumulated_gradients"
KERAS_MOVE_AVERAGES = "_update_model_variables_moving_average"
KERAS_OVERWRITE = "_overwrite_model_variables_with_average_value"

_MARK = "_tfdist_distributed"
_STATE = "_tfdist_compression"
_replica = threading.local()  # under Mirrored each replica is traced in a thread of its own


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
            `tfdist.compression.create`); None means TensorFlow's all-reduce.
        clip_after_reduce: Whether `clipnorm`, `global_clipnorm` and `clipvalue` clip the reduced gradient, as one process
            would, which is what the Trainer asks for (tensorflow#33929). False keeps Keras' order: each replica clips its
            own share of the gradient, before the sum.

    Returns:
        `optimizer`.

    Raises:
        ConfigError: There is no such compressor, or an argument of its is out of range.
    """
    if getattr(optimizer, _MARK, False):
        return optimizer
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    leaf = optimizer.inner_optimizer if scaled else optimizer
    compressor = compression_lib.create(compression)
    for name in ("apply", "build", "scale_loss", KERAS_REDUCTION, KERAS_UPDATE, KERAS_CLIP, _MARK):
        vars(leaf).pop(name, None)  # it was used without its LossScaleOptimizer before, or with another one
    setattr(optimizer, _MARK, True)
    update = _Update(leaf, scaled, clip_after_reduce)
    if compressor is not None:
        _warn_of_adaptive(leaf, compressor)
        leaf.build = _Build(leaf, compressor, update)
    setattr(leaf, KERAS_REDUCTION, list)
    setattr(leaf, KERAS_UPDATE, update)
    optimizer.apply = _Reduce(optimizer, update)
    optimizer.scale_loss = _ScaleLoss(optimizer)
    return optimizer


def reduction_of(optimizer: keras.optimizers.Optimizer) -> Reduction | None:
    """Returns what sums an optimizer's gradients through a compressor, once it is built; None without one."""
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), _STATE, None)


def _warn_of_adaptive(optimizer: keras.optimizers.Optimizer, compressor: Compressor) -> None:
    kinds = [keras.optimizers.Adam, keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta]
    kinds += [keras.optimizers.Adamax, keras.optimizers.Nadam, keras.optimizers.Lamb]
    if not compressor.suits_adaptive and isinstance(optimizer, tuple(kinds)):
        warnings.warn(
            f"{type(optimizer).__name__} divides by what gradients have been, which {compressor.name} makes rare and "
            "large: it may train worse, or not at all. Use compression 'powersgd' or 'int8' with it, or SGD with momentum.",
            stacklevel=3,
        )


@contextlib.contextmanager
def sharing(share: tf.Tensor | float | None) -> Iterator[None]:
    """Multiplies this replica's gradients by `share`, its part in the mean over all replicas; None means 1.

    It multiplies the loss where the step calls `scale_loss`, which costs nothing, and otherwise each gradient.
    """
    _replica.share, _replica.scaled = share, set()
    try:
        yield
    finally:
        _replica.share = None


@contextlib.contextmanager
def capturing() -> Iterator[list[tuple[Sequence[Any], Sequence[Any] | None]]]:
    """Keeps the arguments of this replica's `apply` calls, instead of applying them."""
    captured: list[tuple[Sequence[Any], Sequence[Any] | None]] = []
    _replica.captured = captured
    try:
        yield captured
    finally:
        _replica.captured = None


class _ScaleLoss:
    """`scale_loss`, which Keras calls before it computes gradients."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._scale_loss = optimizer.scale_loss
        self._key = id(optimizer)

    def __call__(self, loss: Any) -> Any:
        loss = self._scale_loss(loss)
        if (share := getattr(_replica, "share", None)) is None:
            return loss
        _replica.scaled.add(self._key)
        return loss * tf.cast(share, loss.dtype)


class _Reduce:
    """`apply` of the outermost optimizer: reduces, then goes on as Keras does."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, update: _Update):
        self._optimizer = optimizer
        self._apply = optimizer.apply
        self._update = update
        self._key = id(optimizer)

    def __call__(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if (share := getattr(_replica, "share", None)) is not None:
            grads = _without_nan(grads, share) if self._key in _replica.scaled else _scale(grads, share)
        if (captured := getattr(_replica, "captured", None)) is not None:
            captured.append((grads, trainable_variables))
            return
        if not self._update.reduces:
            grads = self._update.clip_first(grads, self._optimizer.dynamic_scale if self._update.scaled else 1.0)
        context = tf.distribute.get_replica_context()
        if context and self._update.reduction and not self._update.reduces:
            variables = self._update.variables if trainable_variables is None else trainable_variables
            present = [(grad, variable) for grad, variable in zip(grads, variables, strict=True) if grad is not None]
            mine, variables = zip(*present, strict=True)
            context.merge_call(functools.partial(self._compressed, variables=variables), args=(list(mine),))
            return
        if not self._update.reduces:
            grads = _all_reduce(tf.distribute.ReduceOp.SUM, grads)
        elif self._update.scaled:
            grads = _finite_on_all_or_none(grads)
        self._apply(grads, trainable_variables)

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


class _Build:
    """`build` of the optimizer: makes the compressor's state, too."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, compression: Compressor, update: _Update):
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
        if getattr(variables[0].value, "distribute_strategy", None) is None:
            return  # one replica, which has nobody to send to
        self._update.reduction = reduction = Reduction(self._compression, variables)
        setattr(self._optimizer, _STATE, reduction)  # where a backup looks


class _Update:
    """`_backend_apply_gradients`: what Keras does under a condition is done outside of the replicas.

    Args:
        optimizer: The optimizer that updates.
        scaled: Whether a `LossScaleOptimizer` wraps it.
        clips_last: Whether it clips the reduced gradient.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, scaled: bool, clips_last: bool):
        self._optimizer = optimizer
        self._keras_update = getattr(optimizer, KERAS_UPDATE)
        self.scaled = scaled
        self.reduction: Reduction | None = None
        self._clip: Callable[[Any], Any] | None = None
        if not clips_last and any((optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)):
            self._clip = getattr(optimizer, KERAS_CLIP)
            setattr(optimizer, KERAS_CLIP, list)  # it has been done by then

    def clip_first(self, grads: Sequence[Any], scale: Any = 1.0) -> Sequence[Any]:
        """Returns this replica's gradients, which are multiplied by `scale`, clipped if it is not done later."""
        if self._clip is None:
            return grads
        present = [grad for grad in grads if grad is not None]
        clipped = iter(_scale(self._clip(_scale(present, 1 / scale)), scale))
        return [None if grad is None else next(clipped) for grad in grads]

    @property
    def variables(self) -> Sequence[Any]:
        """Those that the optimizer was built with."""
        return self._optimizer._trainable_variables

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any], scale: Any = None) -> tuple[list[Any], tf.Tensor]:
        """Returns the sums of values per replica, and whether all are finite. In cross-replica context.

        Args:
            grads: A value per replica for each gradient.
            variables: Of each.
            scale: By what the gradients are multiplied, or None.
        """
        numbers = [self._optimizer._get_variable_index(variable) for variable in variables]
        assert self.reduction is not None  # noqa: S101 (for the type checker: who calls this has looked)
        return self.reduction(grads, numbers, self._optimizer.iterations, scale)

    @property
    def reduces(self) -> bool:
        """Whether it reduces the gradients itself, once for several steps."""
        return bool(self._optimizer.gradient_accumulation_steps)

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        optimizer = self._optimizer
        context = tf.distribute.get_replica_context()
        if context and (optimizer.gradient_accumulation_steps or optimizer.ema_overwrite_frequency):
            context.merge_call(functools.partial(self._across, variables=variables), args=(grads,))
        else:
            self._keras_update(grads, variables)

    def _across(self, strategy: tf.distribute.Strategy, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        optimizer = self._optimizer
        # `_iterations` counts steps, and the property `iterations` updates.
        step = tf.convert_to_tensor(optimizer._iterations.value) + 1
        update = tf.convert_to_tensor(optimizer.iterations) + 1

        def each(function: Callable[..., None]) -> None:
            strategy.extended.call_for_each_replica(function, args=(grads, variables))

        if steps := optimizer.gradient_accumulation_steps:
            tf.cond(step % steps == 0, lambda: self._end(strategy, grads, variables), lambda: each(self._add))
        else:
            each(self._step)
        if optimizer.use_ema:
            trained = optimizer._trainable_variables
            strategy.extended.call_for_each_replica(getattr(optimizer, KERAS_MOVE_AVERAGES), args=(trained,))
            if frequency := optimizer.ema_overwrite_frequency:
                overwrite = getattr(optimizer, KERAS_OVERWRITE)
                tf.cond(update % frequency == 0, lambda: overwrite(trained), lambda: None)

    def _step(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        optimizer = self._optimizer
        grads = optimizer._clip_gradients(grads)
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(grads, variables, optimizer.learning_rate)

    def _add(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        for accumulator, total in self._totals(grads, variables):
            accumulator.assign(total)

    def _end(self, strategy: tf.distribute.Strategy, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        """Updates with what the steps have added up, which is encoded once."""
        call = strategy.extended.call_for_each_replica
        if not (self.reduction and self.reduces):
            call(self._update, args=(grads, variables))
            return
        shares = call(self._shares, args=(grads, variables))
        totals, finite = self.reduce(shares, variables)
        tf.cond(finite, lambda: call(self._step, args=(totals, variables)), lambda: None)

    def _update(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        means = self._shares(grads, variables)
        self._step(_all_reduce(tf.distribute.ReduceOp.SUM, means) if self.reduces else means, variables)

    def _shares(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[tf.Tensor]:
        """Returns what this replica adds to the mean over steps and replicas, and begins to add up anew."""
        strategy = tf.distribute.get_strategy()
        steps = self._optimizer.gradient_accumulation_steps
        accumulators, totals = zip(*self._totals(grads, variables), strict=True)
        shares = [total / (steps * (strategy.num_replicas_in_sync if self.reduces else 1)) for total in totals]
        shares = list(self.clip_first(shares)) if self.reduces else shares
        for accumulator in accumulators:
            accumulator.assign(tf.zeros_like(accumulator))
        return shares

    def _totals(self, grads: Sequence[Any], variables: Sequence[Any]) -> Iterator[tuple[tf.Variable, tf.Tensor]]:
        # A replica's gradient is its share of a sum, while accumulators are statistics, which average over the replicas:
        # so the mean of the accumulators is what one process would have.
        strategy = tf.distribute.get_strategy()
        shares = strategy.num_replicas_in_sync if self.reduces else 1
        for grad, variable in zip(grads, variables, strict=True):
            index = self._optimizer._get_variable_index(variable)
            accumulator = getattr(self._optimizer, KERAS_ACCUMULATORS)[index].value
            yield accumulator, accumulator + tf.convert_to_tensor(grad) * shares


def _scale(grads: Sequence[Any], share: tf.Tensor | float) -> list[Any]:
    """Returns the gradients times `share`; 0 makes 0 of NaN, too."""

    def times(value: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(value, tf.cast(share, value.dtype))

    return [None if grad is None else on_values(times, grad) for grad in grads]


def _without_nan(grads: Sequence[Any], share: tf.Tensor | float) -> list[Any]:
    """Returns the gradients, or zeros where this replica has no examples: the mean over none is NaN."""
    if isinstance(share, float):
        return list(grads)
    present = [grad for grad in grads if grad is not None]
    values = iter(tf.cond(share > 0, lambda: present, lambda: _scale(present, share)))
    return [None if grad is None else next(values) for grad in grads]


def _finite_on_all_or_none(grads: Sequence[Any]) -> list[Any]:
    """Returns this replica's gradients, or NaN if any replica's is not finite: it sends a number for all of them."""
    present = [grad for grad in grads if grad is not None]
    (nothing,) = _all_reduce(tf.distribute.ReduceOp.SUM, [nothing_if_finite(present)])
    return [
        None if grad is None else on_values(lambda value: value + tf.cast(nothing, value.dtype), grad) for grad in grads
    ]


def _all_reduce(op: tf.distribute.ReduceOp, grads: Sequence[Any]) -> list[Any]:
    """Returns the gradients reduced over all replicas, in one call for each type of number."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return list(grads)
    reduced = list(grads)
    for dtype in dict.fromkeys(g.dtype for g in grads if g is not None):
        places = [place for place, g in enumerate(grads) if g is not None and g.dtype == dtype]
        for place, value in zip(places, context.all_reduce(op, [grads[place] for place in places]), strict=True):
            reduced[place] = value
    return reduced
