"""Computes in one graph what another graph computes from given tensors: logs from metrics.

`ComputedLogs` are those that a step of one's own computes from its metrics' results, as `{"loss": self.total_loss.result()}`. Within a step
a metric holds what its replica has counted, and the replicas' results are averaged. At the end of an epoch or evaluation Keras takes the
metrics' results over all replicas for logs that have the metrics' names; here, the others too are computed from what the metrics hold on
all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.tf_internals import EagerTensor
from tfdist.replicas import random_seeds


def depends_only_on(given: Callable[[tf.Tensor], bool], values: Any) -> bool:
    """Whether `values` are computed from given tensors and constants alone.

    Args:
        given: Whether a tensor of their graph is given.
        values: Tensors, in any structure.
    """
    pending, seen, met = list(tf.nest.flatten(values)), set(), False
    while pending:
        each = pending.pop()
        if _is_constant(each) or id(each) in seen:
            continue
        seen.add(id(each))
        if given(each):
            met = True
            continue
        # What else has no inputs is an argument, a variable, or random.
        if each.op.type != "Const" and (not each.op.inputs or each.op.op_def.is_stateful or _calls(each.op)):
            return False
        pending += each.op.inputs
    return met


def trace_apart(fn: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """Traces a function in a graph that is never run. Returns what it returns.

    In a thread of its own, outside of the replicas, as a function within a replica's step could assign no variable of theirs. There
    `keras.random` draws from a generator of its own, so that the steps draw what they would have drawn.

    Args:
        fn: The function.
        specs: The types of its arguments.

    Raises:
        Exception: What `fn` raises.
    """
    strategy, found = tf.distribute.get_strategy(), []

    def keep(*args: Any) -> None:
        found.append(fn(*args))

    def trace() -> None:
        with strategy.scope(), random_seeds.StepSeedGenerator(tf.constant(0), seed=1).installed():
            tf.function(keep, autograph=False).get_concrete_function(*specs)

    random_seeds.run_in_clean_thread(trace)
    return found[-1]


def depends_on(given: Any, value: tf.Tensor) -> bool:
    """Whether a tensor is computed from one of `given`, a structure of tensors; outside of a graph, where that is not known, True."""
    if isinstance(value, EagerTensor):
        return True
    wanted = {id(each) for each in tf.nest.flatten(given, expand_composites=True)}
    pending, seen = [value], set()
    while pending:
        each = pending.pop()
        if id(each) in wanted:
            return True
        if id(each) not in seen:
            seen.add(id(each))
            pending += each.op.inputs
    return False


def copied(now: Callable[[tf.Tensor], tf.Tensor | None], values: Any) -> Any:
    """Returns in the present graph what `values` are with other tensors in place of the given ones.

    Args:
        now: Returns a tensor of the present graph for a given one, and None for any other.
        values: For which `depends_only_on` holds.
    """
    graph = tf.compat.v1.get_default_graph()
    copies: dict[int, tf.Tensor] = {}

    def copy(tensor: Any) -> Any:
        if _is_constant(tensor):
            return tf.convert_to_tensor(tensor)
        if id(tensor) not in copies:
            if (replaced := now(tensor)) is not None:
                copies[id(tensor)] = replaced
                return replaced
            op = tensor.op
            made = graph.create_op(
                op.type,
                [copy(each) for each in op.inputs],
                [each.dtype for each in op.outputs],
                attrs={name: op.node_def.attr[name] for name in op.node_def.attr},
                op_def=op.op_def,
            )
            copies.update((id(old), new) for old, new in zip(op.outputs, made.outputs, strict=True))
        return copies[id(tensor)]

    return tf.nest.map_structure(copy, values)


def _is_constant(value: Any) -> bool:
    return not isinstance(value, tf.Tensor) or isinstance(value, EagerTensor)


def _calls(op: tf.Operation) -> bool:
    return any(op.node_def.attr[name].HasField("func") for name in op.node_def.attr)


class ComputedLogs:
    """The logs of a step, as far as they depend on its metrics alone.

    Args:
        model: The model.
        logs: What its step has returned, on a replica for which the step is being traced.
    """

    def __init__(self, model: keras.Model, logs: Mapping[str, Any]):
        graph = tf.compat.v1.get_default_graph()
        variables = [variable.value for metric in model.metrics for variable in metric.variables]
        self._variables = {id(graph.capture(variable.handle)): variable for variable in variables}
        self._logs = {
            name: value
            for name, value in logs.items()
            if depends_only_on(lambda tensor: self._read(tensor) is not None, value)
        }
        self._compute = tf.function(self._copied, autograph=False)

    def now(self) -> dict[str, Any]:
        """Returns these logs as they are for all replicas: collectives, where workers hold the metrics."""
        if not self._logs:
            return {}
        found: dict[str, Any] = self._compute({key: tf.convert_to_tensor(v) for key, v in self._variables.items()})
        return found

    def _read(self, tensor: tf.Tensor) -> int | None:
        """Returns which variable a tensor is read from."""
        if tensor.op.type != "ReadVariableOp" or id(tensor.op.inputs[0]) not in self._variables:
            return None
        return id(tensor.op.inputs[0])

    def _copied(self, values: dict[int, tf.Tensor]) -> Any:
        def now(tensor: tf.Tensor) -> tf.Tensor | None:
            variable = self._read(tensor)
            return None if variable is None else values[variable]

        return copied(now, self._logs)
