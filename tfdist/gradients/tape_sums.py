"""The sums of gradients where the step's tape returns them, for a step of the user's own that uses its gradients.

The optimizer sums the gradients of all replicas after the user's code. That is right for a step that applies the gradients that its tapes
return. A step that changes them by something non-linear (a clip, a sign), or that computes other values from them (a logged norm, moved
weights), needs the sums. So each gradient is first returned as a tensor of its own, for which the optimizer takes the original: if anything else
in the traced graph reads it, the step is traced again, and its tapes return sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Gradient, Variables
from tfdist.compat import call_stack, optimizer_search, tapes
from tfdist.errors import ConfigError
from tfdist.layers.table import is_own
from tfdist.runtime.log import logger

Sum = Callable[[list[Gradient], Variables], list[Gradient]]

_SUMMED_TWICE = (
    "{place}: the step sums {values} over the replicas by all_reduce(SUM), and tfdist sums the gradients of a step, too, so that they "
    "would count twice. Remove the all_reduce: the step then has the gradient of the whole batch."
)
_LOCAL = (
    "%s: a tape within another tape, or a jacobian, returns the gradient of each replica's own examples with respect to weights (%s). That is right "
    "where the loss depends on it linearly, as a Hessian times a vector does; in other losses (MAML, a norm of it) one device would use the "
    "gradient of the whole batch. There, train with one replica for each worker under parameter_server, or on one device."
)
_OWN_ROWS = (
    "The step uses the gradient of {path} otherwise than to apply it, and each worker has only the gradient of the rows that it holds. Give "
    "tfdist.layers.Embedding shards=1, or let the optimizer clip (clipnorm, global_clipnorm)."
)
_warned: set[str] = set()  # the lines for which `_LOCAL` was logged


class GradientsUsedError(Exception):
    """A traced step uses its gradients otherwise than to apply them: it must be traced again, with sums at its tapes."""


class TapeSums:
    """The gradients that the tapes of one replica's step return.

    Args:
        sums: Whether the tapes return sums over all replicas.
        graph: The graph of the step's trace; None if it runs eagerly.
        sum_over_replicas: Returns the sums of this replica's gradients with respect to variables.
        trained: The variables to which optimizers apply gradients.
    """

    def __init__(self, sums: bool, graph: tf.Graph | None, sum_over_replicas: Sum | None, trained: Variables):
        self.sums = sums
        self._graph = graph
        self._sum = sum_over_replicas
        self._trained = trained
        self._returned: dict[
            int, tuple[Gradient, Gradient]
        ] = {}  # what a tape has returned, and the replica's own gradient
        self._of_tables: list[tuple[Gradient, str]] = []  # gradients of rows that this worker holds, and their paths
        self._by_hand: dict[int, tuple[Any, str]] = {}  # gradients that the step has summed, and its line

    def asked(self, sources: Sequence[Any]) -> None:
        """Does nothing."""

    def returned(self, sources: Sequence[Any], grads: Sequence[Gradient]) -> list[Gradient]:
        """Returns the gradients that a tape returns to the step."""
        returned = list(grads)
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph is not self._graph:  # replicas cannot sum in a branch, a loop or a nested function
            return returned
        of_variables = [
            i for i, (source, grad) in enumerate(zip(sources, grads, strict=True)) if _is_shared(source, grad)
        ]
        own = [grads[index] for index in of_variables]
        values = self._sum(own, [sources[index] for index in of_variables]) if self.sums and own and self._sum else own
        for index, value in zip(of_variables, values, strict=True):
            returned[index] = _new(value)
            self._returned[id(returned[index])] = returned[index], grads[index]
        for index, (source, grad) in enumerate(zip(sources, grads, strict=True)):
            if self._sum is not None and _is_trained(source, grad) and is_own(source):
                returned[index] = _new(grad)
                self._returned[id(returned[index])] = returned[index], grad
                self._of_tables.append((returned[index], getattr(source, "path", source.name)))
        return returned

    def keeps_local(self, sources: Sequence[Any]) -> None:
        """Warns once of a line that computes a replica's own gradient with respect to weights."""
        if self._sum is None:
            return
        weights = [source for source in sources if _is_shared(source, True)]
        place = call_stack.users_place()
        if weights and place not in _warned:
            _warned.add(place)
            logger.warning(_LOCAL, place, ", ".join(getattr(each, "path", each.name) for each in weights[:3]))

    def reduced_by_hand(
        self, op: Any, values: Sequence[Any], reduce: Callable[[list[Any]], Sequence[Any]]
    ) -> Sequence[Any]:
        """Reduces values in a step. Of a tape's gradients it reduces each replica's own.

        Raises ConfigError if the step's own code sums a value that depends on such a gradient.
        """
        sums = (
            str(getattr(op, "value", op)).upper() == "SUM"
            and self._sum is not None
            and call_stack.is_reduced_by_users()
        )
        others = [value for value in values if id(value) not in self._returned]
        if sums and others and self._returned and self._graph is not None and _in_graph(self._graph):
            reached = _reachable(self._graph, self._tensors(), self._trained)
            tensors = [t for t in tf.nest.flatten(others, expand_composites=True) if tf.is_tensor(t)]
            if not reached.isdisjoint(tensor.name for tensor in tensors if _is_of(tensor, self._graph)):
                summed = "values that it computes from its gradients"
                raise ConfigError(_SUMMED_TWICE.format(place=call_stack.users_place(), values=summed))
        totals = reduce(self.originals(values))
        if sums:
            for value, total in zip(values, totals, strict=True):
                if id(value) in self._returned:
                    self._by_hand[id(total)] = total, call_stack.users_place()
        return totals

    def check_summed_once(self, grads: Sequence[Gradient]) -> None:
        """Raises ConfigError if gradients to apply are sums already, which the step has made."""
        for grad in grads:
            if id(grad) in self._by_hand:
                place = self._by_hand[id(grad)][1]
                raise ConfigError(_SUMMED_TWICE.format(place=place, values="gradients that it applies"))

    def check_tables(self) -> None:
        """Raises ConfigError if the step reads a gradient of rows that this worker holds, which is summed already."""
        if self._graph is None:
            return
        for grad, path in self._of_tables:
            if any(tensor.consumers() for tensor in _tensors_of(grad)):
                raise ConfigError(_OWN_ROWS.format(path=path))

    def original_rows(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Returns gradients to apply, with the original ones of rows that this worker holds, so that only the step reads the returned ones."""
        tables = {id(grad) for grad, _ in self._of_tables}
        return [self._returned[id(grad)][1] if id(grad) in tables else grad for grad in grads]

    def originals(self, grads: Sequence[Gradient]) -> list[Gradient]:
        """Returns gradients to apply, with this replica's own ones in place of those that a tape has returned."""
        return [self._returned[id(grad)][1] if id(grad) in self._returned else grad for grad in grads]

    def is_used(self, logs: Any = None) -> bool:
        """Returns whether the traced step reads a gradient that a tape has returned, or it is in `logs`. It need not be read to be applied."""
        if self._graph is None:
            return False
        return any(id(value) in self._returned for value in tf.nest.flatten(logs)) or any(
            tensor.consumers() for tensor in self._tensors()
        )

    def _tensors(self) -> list[tf.Tensor]:
        """Returns the values, and the ids of rows, that only the step reads."""
        return [tensor for grad, _ in self._returned.values() for tensor in _tensors_of(grad)]

    def unsummed(self, grads: Sequence[Gradient]) -> list[int]:
        """Returns the indices of the gradients to apply that depend on no sum, such as those of a tape in a `tf.while_loop`."""
        present = [index for index, grad in enumerate(grads) if grad is not None and id(grad) not in self._returned]
        if not (self._returned and self._graph and present):
            return [] if self._returned else present
        reached = _reachable(self._graph, self._tensors(), self._trained)
        return [
            index
            for index in present
            if reached.isdisjoint(
                t.name for t in tf.nest.flatten(grads[index], expand_composites=True) if t is not None
            )
        ]


def _is_shared(source: Any, grad: Gradient) -> bool:
    """Returns whether a gradient with respect to a source is a summand of that of the whole batch."""
    return _is_trained(source, grad) and not is_own(source)


def _is_trained(source: Any, grad: Gradient) -> bool:
    """Returns whether a gradient is one with respect to a trainable variable."""
    is_variable = isinstance(source, (keras.Variable, tf.Variable)) and source.trainable
    return grad is not None and is_variable


def _tensors_of(grad: Gradient) -> list[tf.Tensor]:
    return [grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad]


def _in_graph(graph: tf.Graph) -> bool:
    """Returns whether operations are added to a graph, and not to one within it."""
    return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is graph


def _is_of(tensor: tf.Tensor, graph: tf.Graph) -> bool:
    return getattr(tensor, "graph", None) is graph


def _new(grad: Gradient) -> Gradient:
    """Returns a gradient as a tensor of its own, which nothing else reads."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(grad.values), tf.identity(grad.indices), grad.dense_shape)
    return tf.identity(grad)


def _reachable(graph: tf.Graph, tensors: Sequence[tf.Tensor], trained: Variables) -> set[str]:
    """Returns the names of the tensors that depend on others, also by way of variables which the step assigns and does not train."""
    ends = tapes.captured_handles(graph, trained)
    reached = {tensor.name for tensor in tensors}
    size = -1
    while len(reached) > size:
        size = len(reached)
        for operation in graph.get_operations():
            if reached.isdisjoint(tensor.name for tensor in operation.inputs):
                continue
            reached.update(tensor.name for tensor in operation.outputs)
            if operation.type.startswith(("Assign", "ResourceScatter")):
                handles = {tensor.name for tensor in operation.inputs if tensor.dtype == tf.resource}
                reached |= handles - ends
    return reached


@contextlib.contextmanager
def applying_sums(model: keras.Model, sums: bool) -> Iterator[None]:
    """Lets the optimizers of a model apply gradients that are sums already, within the context. Outside of replicas."""
    updates = [optimizer.apply.update for optimizer in optimizer_search.optimizers(model) if sums]
    for update in updates:
        update.takes_sums = True
    try:
        yield
    finally:
        for update in updates:
            update.takes_sums = False
