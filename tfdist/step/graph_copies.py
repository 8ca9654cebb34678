"""Copies of computations from one graph in another, such as the logs that a custom step computes from its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Function, Structure
from tfdist.compat.tf_internals import EagerTensor
from tfdist.replicas import random_seeds, step_context
from tfdist.replicas.step_context import StepContext
from tfdist.step.empty_replicas import metric_variables


class ComputedLogs:
    """The logs that a custom step computes from its metrics alone, as `{"loss": self.total_loss.result()}`.

    Within a step a metric holds its replica's counts, so such a log is the mean of the replicas' results. At
    the end of an epoch or evaluation Keras computes a log with a metric's name from all replicas' counts; `now`
    computes the other logs from these counts.

    `logs` are the logs of the step that is being traced, on one replica.
    """

    def __init__(self, model: keras.Model, logs: Mapping[str, Any]):
        graph = tf.compat.v1.get_default_graph()
        self._variables = {id(graph.capture(variable.handle)): variable for variable in metric_variables(model)}
        self._logs = {
            name: value
            for name, value in logs.items()
            if depends_only_on(lambda tensor: self._read(tensor) is not None, value)
        }
        self._compute = tf.function(self._copy_logs, autograph=False)

    def now(self) -> dict[str, Any]:
        """Returns these logs, computed from the metrics of all replicas; a collective if workers hold the metrics."""
        if not self._logs:
            return {}
        logs: dict[str, Any] = self._compute({key: tf.convert_to_tensor(v) for key, v in self._variables.items()})
        return logs

    def _read(self, tensor: tf.Tensor) -> int | None:
        """Returns the key of the variable that a tensor reads, or None."""
        if tensor.op.type != "ReadVariableOp" or id(tensor.op.inputs[0]) not in self._variables:
            return None
        return id(tensor.op.inputs[0])

    def _copy_logs(self, values: dict[int, tf.Tensor]) -> Structure:
        def now(tensor: tf.Tensor) -> tf.Tensor | None:
            variable = self._read(tensor)
            return None if variable is None else values[variable]

        return copy_to_current_graph(now, self._logs)


def copy_to_current_graph(now: Callable[[tf.Tensor], tf.Tensor | None], values: Structure) -> Structure:
    """Computes `values`, tensors of another graph for which `depends_only_on` holds, in the current graph.

    `now` returns the current graph's tensor that replaces a tensor of the other graph, or None to copy its operation.
    """
    graph = tf.compat.v1.get_default_graph()
    copies: dict[int, tf.Tensor] = {}

    def copy(tensor: tf.Tensor) -> Structure:
        if _is_constant(tensor):
            return tf.convert_to_tensor(tensor)
        if id(tensor) in copies:
            return copies[id(tensor)]
        replaced = now(tensor)
        if replaced is not None:
            copies[id(tensor)] = replaced
            return replaced
        op = tensor.op
        copied_op = graph.create_op(
            op.type,
            [copy(tensor) for tensor in op.inputs],
            [output.dtype for output in op.outputs],
            attrs={name: op.node_def.attr[name] for name in op.node_def.attr},
            op_def=op.op_def,
        )
        copies.update((id(old), new) for old, new in zip(op.outputs, copied_op.outputs, strict=True))
        return copies[id(tensor)]

    return tf.nest.map_structure(copy, values)


def depends_only_on(is_source: Callable[[tf.Tensor], bool], values: Structure) -> bool:
    """Returns whether `values`, a structure of tensors, depend only on constants and on tensors (at least one) for which `is_source` is true."""
    pending = list(tf.nest.flatten(values))
    seen = set()
    has_source = False
    while pending:
        tensor = pending.pop()
        if _is_constant(tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if is_source(tensor):
            has_source = True
            continue
        # Other operations without inputs are arguments, variables or random numbers.
        op = tensor.op
        if op.type != "Const" and (not op.inputs or op.op_def.is_stateful or _calls_functions(op)):
            return False
        pending += op.inputs
    return has_source


def _is_constant(value: Structure) -> bool:
    return not isinstance(value, tf.Tensor) or isinstance(value, EagerTensor)


def _calls_functions(op: tf.Operation) -> bool:
    return any(op.node_def.attr[name].HasField("func") for name in op.node_def.attr)


def depends_on(sources: Structure, value: tf.Tensor) -> bool:
    """Returns whether a tensor depends on one of the tensors in `sources`; True outside of a graph, where this is unknown."""
    if isinstance(value, EagerTensor):
        return True
    source_ids = {id(source) for source in tf.nest.flatten(sources, expand_composites=True)}
    pending = [value]
    seen = set()
    while pending:
        tensor = pending.pop()
        if id(tensor) in source_ids:
            return True
        if id(tensor) not in seen:
            seen.add(id(tensor))
            pending += tensor.op.inputs
    return False


def adds_to(start: tf.Tensor, value: tf.Tensor, state: Sequence[tf.Tensor]) -> bool:
    """Returns whether `value`, a variable's new value, is its old value `start` plus or minus addends.

    The addends must not depend on `state`: the old values of all variables, including `start`. All tensors are of one graph.
    """
    if value is start:
        return True
    op = value.op
    if op.type == "Identity":
        return adds_to(start, op.inputs[0], state)
    inputs = list(op.inputs)
    if op.type == "Sub":
        return adds_to(start, inputs[0], state) and not depends_on(state, inputs[1])
    if op.type not in ("Add", "AddV2", "AddN"):
        return False
    addends = [tensor for tensor in inputs if not depends_on(start, tensor)]
    from_start = [tensor for tensor in inputs if depends_on(start, tensor)]
    return (
        len(from_start) == 1
        and adds_to(start, from_start[0], state)
        and not any(depends_on(state, addend) for addend in addends)
    )


def trace_apart(fn: Function, specs: Sequence[Structure]) -> tuple[Structure, Any]:
    """Traces a function in a graph apart from the step. Returns the function's result in that graph, and the traced function.

    It is traced in a new thread, outside of the replicas, because a function within a replica's step could not assign the
    replicas' variables. `keras.random` draws from a separate generator there, so that the steps' random numbers do not change.
    """
    strategy = tf.distribute.get_strategy()
    results = []

    def record(*args: Any) -> Structure:
        with step_context.running(StepContext(None, is_alone=True)):
            result = fn(*args)
        results.append(result)
        return result if tf.is_tensor(result) else None  # a traced function cannot return other objects

    def trace() -> Any:
        with strategy.scope(), random_seeds.StepSeedGenerator(tf.constant(0), seed=1).installed():
            return tf.function(record, autograph=False).get_concrete_function(*specs)

    traced = random_seeds.run_in_clean_thread(trace)
    return results[-1], traced
