"""The context that a replica's step hands to its losses, layers and optimizers while it is traced."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Structure


@dataclasses.dataclass
class StepContext:
    """A replica's part of a batch, and its optimizer's use of the gradients.

    Attributes:
        examples: How many examples of this replica count, a scalar; None where that is not known.
        part: Returns its part of the batch of all replicas; None where there is one replica. Perhaps a collective.
        rows: How many rows it holds: as many, but 1 where it has no example. None where that is not known.
        place: Returns which example of the whole batch is its first, from 0, and how many that has, dealt out evenly. None where
            the replicas have batches of their own.
        number: Which step of an execution it is, from 0.
        data: Its part of the batch.
        is_compiled: Whether XLA compiles the step.
        is_alone: Whether there is one replica.
        optimizer: The one that the model is compiled with.
        gradient_weight: The factor of this replica's gradients in the sum over all; None means 1.
        weighs_loss: Whether `optimizer.scale_loss` multiplies the loss by it instead, which costs nothing: if the step is
            Keras' own, which scales the loss once and applies its gradients once. A step of the user's may scale one loss
            for two optimizers, or apply gradients of a loss that was not scaled.
        deferred: Where the arguments of `apply` are kept, instead of being applied; None where they are applied.
        is_applying: Whether an optimizer that reduces first is applying gradients.
        graph: The graph in which the step is traced, where collectives may be; None where the step runs eagerly.
    """

    examples: tf.Tensor | None
    part: Callable[[], tf.Tensor] = lambda: None
    rows: tf.Tensor | int | None = None
    place: Callable[[], tuple[tf.Tensor, tf.Tensor]] | None = None
    number: tf.Tensor | int = 0
    data: Structure = None
    is_compiled: bool = False
    is_alone: bool = False
    optimizer: keras.optimizers.Optimizer | None = None
    gradient_weight: tf.Tensor | float | None = None
    weighs_loss: bool = False
    deferred: list[tuple[Any, Any]] | None = None
    is_applying: bool = False
    graph: tf.Graph | None = dataclasses.field(
        default_factory=lambda: None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    )


_replica = threading.local()  # under Mirrored each replica is traced in a thread of its own


def current() -> StepContext | None:
    """Returns the context of the step that is being traced in this thread, within `running`; else None."""
    return getattr(_replica, "context", None)


@contextlib.contextmanager
def running(context: StepContext | None) -> Iterator[None]:
    """Within it, this is the `current` context; None hides that of the step."""
    before, _replica.context = current(), context
    try:
        yield
    finally:
        _replica.context = before
