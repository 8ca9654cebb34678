"""Warnings about random draws that no backup can reproduce, from the graphs of datasets and steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import RandomGenerator, StepFunction
from tfdist.compat import tf_internals
from tfdist.data.graph import nodes, walk
from tfdist.data.python_generators import find_generators
from tfdist.data.random_state import python_functions, random_states
from tfdist.errors import list_first
from tfdist.runtime.log import logger

_NAMED = 3  # variables or draws that a message names
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep
    for path in (str(tf.__file__), str(keras.__file__), os.__file__, os.path.dirname(__file__))
)
_THREADS = "call tf.config.experimental.enable_op_determinism() first, or leave out num_parallel_calls"


def warn_if_inexact(doubts: Sequence[str]) -> None:
    """Logs one warning with the reasons why a resume will not be exact, if any."""
    if doubts:
        logger.warning(f"resume will not be exact: {'. Nor will it be as '.join(doubts)}.")


def data_doubts(datasets: Sequence[tf.data.Dataset]) -> Iterator[str]:
    """Yields the reasons why the order or the random numbers of datasets differ from run to run, and the remedies."""
    if tf_internals.is_op_determinism_enabled():
        return
    every = [dataset_node for dataset in datasets for dataset_node in walk(dataset)]
    parallel = [dataset_node for dataset_node in every if tf_internals.is_parallel(dataset_node)]
    if any(
        next(random_states(dataset_node), None) is not None
        or any(map(_random_nodes, tf_internals.dataset_functions(dataset_node)))
        or find_generators(*python_functions(dataset_node))
        for dataset_node in parallel
    ):
        yield f"a dataset's map or interleave draws random numbers in several threads; {_THREADS}"
    if any(
        tf_internals.is_unordered(dataset_node) or dataset_node.options().deterministic is False
        for dataset_node in every
    ):
        yield "a dataset's elements come in any order, which deterministic=False allows; leave it out"


class StepWatch:
    """A check of the first two executions of steps for unsaved state; `known` are variables that a backup holds or need not hold."""

    def __init__(self, function: StepFunction, known: Sequence[tf.Variable], generators: Sequence[RandomGenerator]):
        self._function = function
        self._generators = generators
        handles = {id(variable) for variable in known}
        unknown = {id(v): v for traced in graphs(function) for v in traced.variables if id(v) not in handles}
        self._before = [(variable, variable.numpy()) for variable in unknown.values()]

    def doubts(self) -> Iterator[str]:
        """Yields why a resume will not be exact, and the remedies. Call it after the second execution."""
        yield from step_doubts(self._function)
        calls = [
            node for traced in graphs(self._function) for node in nodes(traced) if tf_internals.is_python_call(node)
        ]
        if {*find_generators(*map(tf_internals.python_function, calls))} - {*self._generators}:
            yield "the step calls Python code that draws from its own generator or the data's; draw with keras.random instead"
        changed = [variable.name for variable, value in self._before if not np.array_equal(variable.numpy(), value)]
        if changed:
            yield f"the step changes {list_first(changed, _NAMED)}, which the model does not know; make it an attribute of the model or a layer"


def step_doubts(function: StepFunction) -> Iterator[str]:
    """Yields a warning about draws of steps from private counters of TensorFlow, with the remedy. Call it after `function` has run."""
    lines = dict.fromkeys(place for traced in graphs(function) for place in _user_lines(traced))
    if lines:
        yield f"the step draws with {list_first(list(lines), _NAMED)}, whose state is private to TensorFlow; draw with keras.random instead"


def graphs(function: StepFunction) -> Iterator[tf.Graph]:
    """Yields the graphs that have been traced for an execution of steps."""
    for held in (function, *getattr(function, "__dict__", {}).values()):
        for traced in tf_internals.traced_functions(held):
            yield traced.graph


def _random_nodes(function: tf.types.experimental.ConcreteFunction) -> bool:
    return any(map(_draws_from_own_counter, {node.op for node in nodes(function.graph)}))


def _draws_from_own_counter(kind: str) -> bool:
    """Returns whether operations of a type draw random numbers from a private counter."""
    known = tf_internals.operation_definition(kind)
    if known is None or not known.is_stateful or kind.startswith("Cudnn") or "Dataset" in kind:
        return False
    return {"seed", "seed2"} <= {attribute.name for attribute in known.attr}


def _user_lines(graph: tf.Graph) -> Iterator[str]:
    seen = set()
    for operation in graph.get_operations():
        if _draws_from_own_counter(operation.type):
            seen.add(operation.name)
            yield f"{operation.type} ({_user_line(operation) or operation.name})"
    for node in nodes(graph):
        if _draws_from_own_counter(node.op) and node.name not in seen:
            yield f"{node.op} ({node.name})"


def _user_line(operation: tf.Operation) -> str | None:
    """Returns the user's line that created an operation, or None."""
    user_frames = [frame for frame in operation.traceback if not frame.filename.startswith(_LIBRARIES)]
    if not user_frames:
        return None
    return f"{os.path.basename(user_frames[-1].filename)}:{user_frames[-1].lineno}"
