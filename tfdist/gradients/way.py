"""The way of gradients from a step to the variables: a list of stages, and its runner."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.aliases import Gradient


@dataclasses.dataclass(frozen=True)
class Batch:
    """Gradients that travel together.

    Attributes:
        grads: The gradients: dense, the rows of a table (`IndexedSlices`), or None. Across replicas each has a value for each replica.
        variables: Their variables.
        finite: Whether the gradients of all ranks are finite, if a stage has found out, the same on all of them; else None.
    """

    grads: Sequence[Gradient]
    variables: Sequence[Any]
    finite: tf.Tensor | None = None

    def of(self, grads: Sequence[Gradient]) -> Batch:
        """Returns other gradients of the same variables."""
        return dataclasses.replace(self, grads=grads)

    @property
    def present(self) -> Batch:
        """The gradients that are not None."""
        pairs = [(grad, var) for grad, var in zip(self.grads, self.variables, strict=True) if grad is not None]
        return Batch([grad for grad, _ in pairs], [variable for _, variable in pairs], self.finite)


Rest: TypeAlias = Callable[[Batch], None]


class Stage:
    """A part of the way. It passes gradients on by calling `rest` once, also in a branch of a condition that is equal on all ranks.

    Attributes:
        across: Whether the stage runs in cross-replica context; else on each replica.
    """

    across: bool = False

    def __call__(self, batch: Batch, rest: Rest) -> None:
        """Passes a batch on."""
        rest(batch)


class Each(Stage):
    """A stage of a function of gradients and their variables, on each replica."""

    def __init__(self, function: Callable[[Sequence[Gradient], Sequence[Any]], Sequence[Gradient]]):
        self._function = function

    def __call__(self, batch: Batch, rest: Rest) -> None:
        rest(batch.of(self._function(batch.grads, batch.variables)))


class End(Stage):
    """The last stage: a function of a batch, on each replica."""

    def __init__(self, function: Callable[[Batch], None]):
        self._function = function

    def __call__(self, batch: Batch, rest: Rest) -> None:
        self._function(batch)


def run(stages: Sequence[Stage], batch: Batch, switches: bool = True) -> None:
    """Runs stages one after the other, each in its context. A stage across replicas gets no gradients that are None, nor do those after it.

    Call it within a replica or in cross-replica context. If all gradients are None, stages across replicas are left out. Without `switches`
    all stages run in the context of the call.
    """
    if not stages:
        return
    stage, *others = stages
    rest = functools.partial(run, others, switches=switches)
    context = tf.distribute.get_replica_context()
    if not switches or stage.across == (context is None):
        stage(batch, rest)
    elif context is None:
        strategy = tf.distribute.get_strategy()
        strategy.extended.call_for_each_replica(lambda grads: stage(batch.of(grads), rest), args=(list(batch.grads),))
    elif (present := batch.present).grads:
        context.merge_call(lambda _, grads: stage(present.of(grads), rest), args=(list(present.grads),))
    else:
        rest(batch)
