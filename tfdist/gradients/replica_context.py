"""What a step tells the optimizers of one replica: how much its gradients count, and whether to apply them now."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

replica = threading.local()  # Mirrored traces each replica in its own thread


@contextlib.contextmanager
def gradient_weight(
    share: tf.Tensor | float | None, compiled: keras.optimizers.Optimizer | None = None, by_loss: bool = False
) -> Iterator[None]:
    """Multiplies this replica's gradients by `share`, its part in the mean over all replicas, in a step of the Trainer.

    Args:
        share: The factor; None means 1.
        compiled: The optimizer that the model is compiled with.
        by_loss: Whether `compiled.scale_loss` multiplies the loss instead, which costs nothing: if the step is Keras'
            own, which scales the loss once and applies its gradients once. A step of the user's may scale one loss for
            two optimizers, or apply gradients of a loss that was not scaled.
    """
    replica.in_step, replica.share = True, share
    replica.compiled, replica.scales = compiled, compiled if by_loss else None
    try:
        yield
    finally:
        replica.in_step, replica.share = False, None
        replica.compiled = replica.scales = None


def current_gradient_weight() -> tf.Tensor | float | None:
    """Returns by what this replica's gradients will be multiplied, in a step that does not multiply its loss; None if by nothing."""
    if getattr(replica, "scales", None) is not None:
        return None
    share: tf.Tensor | float | None = getattr(replica, "share", None)
    return share


@contextlib.contextmanager
def deferred_apply() -> Iterator[list[tuple[Sequence[Any], Sequence[Any] | None]]]:
    """Keeps the arguments of this replica's `apply` calls, instead of applying them."""
    captured: list[tuple[Sequence[Any], Sequence[Any] | None]] = []
    replica.captured = captured
    try:
        yield captured
    finally:
        replica.captured = None
