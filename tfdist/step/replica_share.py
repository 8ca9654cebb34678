"""What a replica knows of its part of a batch while its step is traced, and `total`, with which a user declares a sum."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.gradients import gradient_lists

_TOTAL = "_tfdist_total"


@dataclasses.dataclass
class ReplicaShare:
    """What a replica has of a batch.

    Attributes:
        examples: How many examples of this replica count, a scalar; None where that is not known.
        part: Returns its part of the batch of all replicas; None where there is one replica. Perhaps a collective.
        rows: How many rows it holds: as many, but 1 where it has no example. None where that is not known.
        place: Returns which example of the whole batch is its first, from 0, and how many that has, dealt out evenly. None where
            the replicas have batches of their own.
        step: Which step of an execution it is, from 0.
        data: Its part of the batch.
        compiled: Whether XLA compiles the step.
        is_alone: Whether there is one replica.
    """

    examples: tf.Tensor | None
    part: Callable[[], Any]
    rows: tf.Tensor | int | None = None
    place: Callable[[], tuple[tf.Tensor, Any]] | None = None
    step: Any = 0
    data: Any = None
    compiled: bool = False
    is_alone: bool = False


_replica = threading.local()  # under Mirrored each replica is traced in a thread of its own


def current_share() -> ReplicaShare | None:
    """Returns the share of the replica whose step is being traced in this thread, within `share_is`; else None."""
    return getattr(_replica, "share", None)


@contextlib.contextmanager
def share_is(share: ReplicaShare | None) -> Iterator[None]:
    """Within it, this is what `current_share` returns; None hides that there are other replicas."""
    before, _replica.share = current_share(), share
    try:
        yield
    finally:
        _replica.share = before


def total(value: Any) -> Any:
    """Declares a number to be a sum over the examples of a batch, in what `add_loss`, a loss function or a `train_step` computes.

    Several replicas take a number for a mean over their examples, and average it. A sum they add up:
    `self.add_loss(tfdist.total(kl))`. With one replica, and outside of a training or test step, the value stays as it is.

    Args:
        value: A number: a floating-point tensor of rank 0.

    Returns:
        What to use in its place.
    """
    share = current_share()
    if tf.is_tensor(value):
        value = tf.identity(value) if share is None or share.is_alone else divide_by_share(value, share.part())
        setattr(value, _TOTAL, True)
    return value


def is_total(value: Any) -> bool:
    """Whether `total` has returned a value."""
    return getattr(value, _TOTAL, False)


def divide_by_share(value: Any, part: Any) -> Any:
    """Returns a sum divided by this replica's share, so that the average by shares is the sum over replicas."""
    return tf.math.divide_no_nan(value, gradient_lists.factor(part, value.dtype))
