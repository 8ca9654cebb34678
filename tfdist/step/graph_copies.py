"""Copies computations from one graph to another, such as the logs that a custom step computes from its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Function, Structure
from tfdist.compat.tf_internals import EagerTensor
from tfdist.replicas import random_seeds
from tfdist.step.empty_replicas import metric_variables


class ComputedLogs:
    """The logs that a custom step computes from its metrics alone, as `{"loss": self.total_loss.result()}`.

    Within a step a metric holds its replica's counts, so such a log is the mean of the replicas' results. At
    the end of an epoch or evaluation Keras computes a log with a metric's name from all replicas' counts; `now` does so
    for the others.

    `logs` are those of its step, on a replica for which the step is being traced.
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

    def _copy_logs(self, values: dict[int, tf.Tensor]) -> Structure:
        def now(tensor: tf.Tensor) -> tf.Tensor | None:
            variable = self._read(tensor)
            return None if variable is None else values[variable]

        return copy_to_current_graph(now, self._logs)


def copy_to_current_graph(now: Callable[[tf.Tensor], tf.Tensor | None], values: Structure) -> Structure:
    """Computes `values`, tensors of another graph for which `depends_only_on` holds, in the current graph.

    `now` returns the current graph's tensor that replaces one of the other graph, or None where the tensor is not given.
    """
    graph = tf.compat.v1.get_default_graph()
    copies: dict[int, tf.Tensor] = {}

    def copy(tensor: tf.Tensor) -> Structure:
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


def depends_only_on(given: Callable[[tf.Tensor], bool], values: Structure) -> bool:
    """Returns whether `values`, tensors in any structure, are computed from constants and those tensors of their graph alone for which `given` holds."""
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
        if each.op.type != "Const" and (not each.op.inputs or each.op.op_def.is_stateful or _calls_functions(each.op)):
            return False
        pending += each.op.inputs
    return met


def _is_constant(value: Structure) -> bool:
    return not isinstance(value, tf.Tensor) or isinstance(value, EagerTensor)


def _calls_functions(op: tf.Operation) -> bool:
    return any(op.node_def.attr[name].HasField("func") for name in op.node_def.attr)


def depends_on(given: Structure, value: tf.Tensor) -> bool:
    """Returns whether a tensor is computed from one of the tensors in `given`; True outside of a graph, where it is unknown."""
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


def adds_to(start: tf.Tensor, value: tf.Tensor, state: Sequence[tf.Tensor]) -> bool:
    """Returns whether `value`, which a variable holds now, is `start`, which it held, plus or minus what does not depend on it.

    The addends must not depend on `state`, what all variables held, `start` among them. All are tensors of one graph.
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
    rest = [each for each in inputs if not depends_on(start, each)]
    own = [each for each in inputs if depends_on(start, each)]
    return len(own) == 1 and adds_to(start, own[0], state) and not any(depends_on(state, each) for each in rest)


def trace_apart(fn: Function, specs: Sequence[Structure]) -> Structure:
    """Traces a function in a graph that is never run. Returns the function's result.

    It runs in a new thread, outside of the replicas: a function within a replica's step could assign none of their
    variables. There `keras.random` draws from a separate generator, so that the steps' numbers stay the same.
    """
    strategy, found = tf.distribute.get_strategy(), []

    def keep(*args: Any) -> None:
        found.append(fn(*args))

    def trace() -> None:
        with strategy.scope(), random_seeds.StepSeedGenerator(tf.constant(0), seed=1).installed():
            tf.function(keep, autograph=False).get_concrete_function(*specs)

    random_seeds.run_in_clean_thread(trace)
    return found[-1]
