"""Reduces gradients once over all replicas, before the optimizer looks at them.

Stock Keras 3 reduces last, in `_all_reduce_sum_gradients`: whatever it decides before that (is the gradient finite? does
it need clipping? is it time to update?) it decides on each replica's own gradient. With the reduction first, every
replica decides the same, on the gradient that one process would have.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

# The private names of Keras 3's optimizers that this file leans on; tests/test_keras_seams.py watches them.
KERAS_REDUCTION = "_all_reduce_sum_gradients"
KERAS_UPDATE = "_backend_apply_gradients"
KERAS_ACCUMULATORS = "_accumulated_gradients"
KERAS_MOVE_AVERAGES = "_update_model_variables_moving_average"
KERAS_OVERWRITE = "_overwrite_model_variables_with_average_value"

_MARK = "_tfdist_distributed"
_replica = threading.local()  # under Mirrored each replica is traced in a thread of its own


def distribute_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes `optimizer` reduce first. In place; its class stays, so that it is saved as the plain optimizer it is.

    - `LossScaleOptimizer` looks for inf and NaN in the reduced gradient, so that all replicas skip a step or none.
    - `clipnorm`, `global_clipnorm` and `clipvalue` clip the reduced gradient (tensorflow#33929).
    - `gradient_accumulation_steps` adds up on each replica and reduces once per update.
    - `ema_overwrite_frequency` works: its condition stands outside of the replicas.

    Args:
        optimizer: Created in the strategy's scope. Distributing it again changes nothing.
    """
    if getattr(optimizer, _MARK, False):
        return
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    leaf = optimizer.inner_optimizer if scaled else optimizer
    for name in ("apply", "scale_loss", KERAS_REDUCTION, KERAS_UPDATE, _MARK):
        vars(leaf).pop(name, None)  # it was used without its LossScaleOptimizer before, or with another one
    setattr(optimizer, _MARK, True)
    update = _Update(leaf, scaled)
    setattr(leaf, KERAS_REDUCTION, list)
    setattr(leaf, KERAS_UPDATE, update)
    optimizer.apply = _Reduce(optimizer, update)
    optimizer.scale_loss = _ScaleLoss(optimizer)


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
            grads = _all_reduce(tf.distribute.ReduceOp.SUM, grads)
        self._apply(grads, trainable_variables)


class _Update:
    """`_backend_apply_gradients`: what Keras does under a condition is done outside of the replicas.

    Args:
        optimizer: The optimizer that updates.
        scaled: Whether a `LossScaleOptimizer` wraps it, which must see each step's reduced gradient.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, scaled: bool):
        self._optimizer = optimizer
        self._keras_update = getattr(optimizer, KERAS_UPDATE)
        self._scaled = scaled

    @property
    def reduces(self) -> bool:
        """Whether it reduces the gradients itself, once for several steps."""
        return bool(self._optimizer.gradient_accumulation_steps) and not self._scaled

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
            tf.cond(step % steps == 0, lambda: each(self._update), lambda: each(self._add))
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

    def _update(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        accumulators, totals = zip(*self._totals(grads, variables), strict=True)
        means = [total / self._optimizer.gradient_accumulation_steps for total in totals]
        self._step(_all_reduce(tf.distribute.ReduceOp.MEAN, means) if self.reduces else means, variables)
        for accumulator in accumulators:
            accumulator.assign(tf.zeros_like(accumulator))

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

    def scale(grad: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(times(grad.values), grad.indices, grad.dense_shape)
        return None if grad is None else times(grad)

    return [scale(grad) for grad in grads]


def _without_nan(grads: Sequence[Any], share: tf.Tensor | float) -> list[Any]:
    """Returns the gradients, or zeros where this replica has no examples: the mean over none is NaN."""
    if isinstance(share, float):
        return list(grads)
    present = [grad for grad in grads if grad is not None]
    values = iter(tf.cond(share > 0, lambda: present, lambda: _scale(present, share)))
    return [None if grad is None else next(values) for grad in grads]


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
