"""Variables with a separate value on each replica, and the average of these values."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategy import Strategy


class MovingStatistics:
    """BatchNorm's moving statistics and similar variables, under a strategy with a copy on each replica.

    Between steps each replica keeps its own value (`VariableSynchronization.ON_READ`). Reading a variable outside of a replica
    averages it over all replicas. With several workers this is a collective, which hangs if one worker reads alone.

    Attributes:
        synchronized: Whether all replicas are known to hold the same values, so that reading them needs no peer.
        undeclared: Weights without a declared aggregation that are assigned values that depend on the data, and whether the user has been
            warned of them (see `equal_weights`).
    """

    def __init__(self, strategy: Strategy):
        self.synchronized = False
        self.undeclared: dict[str, bool] = {}
        self._managed = 0
        self._local_steps: weakref.WeakSet[Any] = weakref.WeakSet()
        self._strategy = strategy
        # Numbered in the order of their creation, which is the same on all workers.
        self._refs: dict[int, weakref.ref[tf.Variable]] = {}
        self._numbers = itertools.count()
        self._averaged: tuple[int, ...] = ()  # the numbers of the variables for which `_average` was traced
        self._average: Callable[[], None] = self._average_all
        self._sum = tf.function(
            lambda values: strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None), autograph=False
        )

    def add(self, variable: tf.Variable) -> None:
        """Adds a variable, until it is garbage-collected."""
        self._refs[next(self._numbers)] = weakref.ref(variable)

    def add_local(self, local_steps: Any) -> None:
        """Adds the `LocalSteps` of an optimizer, until it is garbage-collected."""
        self._local_steps.add(local_steps)

    def show_shared(self) -> None:
        """Makes models hold the weights that all workers share, where workers train alone (`LocalSteps`). Not a collective."""
        for local_steps in self._local_steps:
            local_steps.show(anchor=True)

    def __contains__(self, variable: object) -> bool:
        return any(ref() is variable for ref in self._refs.values())

    def variables(self) -> list[tf.Variable]:
        """Returns the variables still in use."""
        return [variable for variable in (ref() for ref in self._refs.values()) if variable is not None]

    def synchronize(self) -> None:
        """Sets every replica's values to their mean over all replicas.

        A collective: under several workers, every worker must call it. Until `desynchronize`, reads are
        local, so that one worker alone may save the model.
        """
        self.show_shared()
        if self._refs and not self.synchronized:
            # References, so that no variable is collected on one worker before this method returns.
            living = self.variables()
            self._drop_deleted_variables()
            names = tuple(self._refs)
            if self._averaged != names:
                self._averaged = names
                self._average = tf.function(self._average_all, autograph=False)
            if names:
                self._average()
            del living
        self.synchronized = True

    def desynchronize(self) -> None:
        """Records that replicas may have changed their values since `synchronize`."""
        self.synchronized = False

    @contextlib.contextmanager
    def caller_marks_changes(self) -> Iterator[None]:
        """Makes the caller responsible for calling `desynchronize` after training steps.

        Outside of this context any pass over data may train, and invalidates `synchronize`. Within it a callback may
        evaluate, and another callback may then save the model on the chief alone.
        """
        self._managed += 1
        try:
            yield
        finally:
            self._managed -= 1

    def mark_possibly_changed(self) -> None:
        """Calls `desynchronize` before a function that may be a training step, except within `caller_marks_changes`."""
        if not self._managed:
            self.desynchronize()

    def _average_all(self) -> None:
        self.average(self.variables())

    def average(self, variables: Sequence[tf.Variable]) -> None:
        """Sets every replica's values of `variables` to their mean over all replicas. A collective."""
        local = self._strategy.experimental_local_results
        for dtype in dict.fromkeys(variable.dtype for variable in variables):  # TensorFlow packs them together
            same = [variable for variable in variables if variable.dtype == dtype]
            means = self._strategy.extended.batch_reduce_to(
                tf.distribute.ReduceOp.MEAN, [(variable, variable) for variable in same]
            )
            for variable, mean in zip(same, means, strict=True):
                for component, value in zip(local(variable), local(mean), strict=True):
                    component.assign(value)

    def _drop_deleted_variables(self) -> None:
        """Drops the variables that are garbage-collected on all workers.

        Python may free a model on one worker earlier than on another, but all workers must average the same variables.
        """
        alive = [ref() is not None for ref in self._refs.values()]
        if self._strategy.traits.several_processes:
            alive = self._alive_on_all_workers(alive)
        self._refs = {number: ref for (number, ref), lives in zip(self._refs.items(), alive, strict=True) if lives}

    def _alive_on_all_workers(self, alive: Sequence[bool]) -> list[bool]:
        local = tf.constant(alive, tf.int32)
        counts = self._sum(self._strategy.experimental_distribute_values_from_function(lambda _: local))
        return [bool(count == self._strategy.num_replicas_in_sync) for count in counts.numpy()]
