"""The context that a replica's step provides to its losses, layers and optimizers while it is traced."""

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
    """A replica's part of the batch, and how its step weights and applies gradients.

    Attributes:
        examples: The number of this replica's examples that count, a scalar; None if unknown.
        part: Returns the fraction of the whole batch's examples that this replica has; None with one replica. May be a collective.
        rows: The number of rows in this replica's batch: `examples`, or 1 if there are none. None if unknown.
        position: Returns the index of this replica's first example in the whole batch, and that batch's size. None if the replicas
            have batches of their own.
        number: The index of the step in its execution.
        data: This replica's part of the batch.
        is_compiled: Whether XLA compiles the step.
        is_alone: Whether there is one replica.
        optimizer: The optimizer that the model is compiled with.
        gradient_weight: The factor of this replica's gradients in the sum over all replicas; None means 1.
        weighs_loss: Whether `optimizer.scale_loss` multiplies the loss by `gradient_weight` instead, which costs nothing. This needs
            Keras' own step, which scales the loss once and applies its gradients once. A custom step may scale one loss for
            two optimizers, or apply gradients of an unscaled loss.
        deferred: If a list, the optimizer's `apply` appends (gradients, variables) to it and changes nothing; None means that it applies.
        is_applying: Whether tfdist's `apply`, which reduces the gradients first, is running.
        gathered: The values of laid-out variables that the step has read, by their holders (`strategies/mesh.py`). An update ends them.
        exchanges_activations: Whether the workers of a model group have exchanged activations in the step (`layers/group_exchanges.py`).
        split_logits: The output of which this worker of a model group has a part, and the group's exchanges (`step/split_logits.py`).
        tapes: The gradients that the step's tapes return (`gradients/tape_sums.py`); None if Keras' own step uses them, and with one replica.
        graph: The graph of the step's trace, in which collectives are allowed; None if the step runs eagerly.
    """

    examples: tf.Tensor | None
    part: Callable[[], tf.Tensor] = lambda: None
    rows: tf.Tensor | int | None = None
    position: Callable[[], tuple[tf.Tensor, tf.Tensor]] | None = None
    number: tf.Tensor | int = 0
    data: Structure = None
    is_compiled: bool = False
    is_alone: bool = False
    optimizer: keras.optimizers.Optimizer | None = None
    gradient_weight: tf.Tensor | float | None = None
    weighs_loss: bool = False
    deferred: list[tuple[Any, Any]] | None = None
    is_applying: bool = False
    gathered: dict[Any, tf.Tensor] = dataclasses.field(default_factory=dict)
    exchanges_activations: bool = False
    split_logits: tuple[tf.Tensor, Any] | None = None
    tapes: Any = None
    graph: tf.Graph | None = dataclasses.field(
        default_factory=lambda: None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    )


_replica = threading.local()  # under Mirrored each replica is traced in a thread of its own


def current() -> StepContext | None:
    """Returns the context of the step that is being traced in this thread, within `running`; else None."""
    return getattr(_replica, "context", None)


@contextlib.contextmanager
def running(context: StepContext | None) -> Iterator[None]:
    """Makes `context` the `current` one within the block; None hides the step's context."""
    before = current()
    _replica.context = context
    try:
        yield
    finally:
        _replica.context = before
