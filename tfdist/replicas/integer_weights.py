"""Integer weights of a model, such as a count of the examples that a layer has seen, hold what one process would count.

Keras gives them no aggregation: each replica counts its own share of the data. What all replicas add alike (1 for each call) counts
once; what depends on the data is summed over the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat.tf_internals import EagerTensor, graph_function
from tfdist.errors import ConfigError, format_value
from tfdist.replicas import batch_splitting

_CONSTANT = ("Const", "ReadVariableOp", "VarHandleOp")
_SUMS = ("AddV2", "Add", "AddN")


def is_integer_weight(kwargs: dict[str, Any]) -> bool:
    """Whether a creator's arguments describe a weight of integers, of which each replica would keep its own value.

    Keras names a type by a text. A `tf.Variable` that a layer makes by itself is no weight, and keeps each replica's value.
    """
    dtype = kwargs.get("dtype")
    return (
        not kwargs.get("trainable", True)
        and isinstance(dtype, str)
        and tf.as_dtype(dtype).is_integer
        and kwargs.get("aggregation") in (None, tf.VariableAggregation.NONE)
        and kwargs.get("synchronization") in (None, tf.VariableSynchronization.AUTO)
    )


def sum_over_replicas(strategy: tf.distribute.Strategy, variable: tf.Variable) -> tf.Variable:
    """Returns the variable, which from now on adds up what depends on the data over all replicas. In place.

    Args:
        strategy: In whose replicas it is assigned.
        variable: Of this strategy.
    """

    def wrapped(own: Callable[..., Any], adds: bool) -> Callable[..., Any]:
        def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
            traced = not tf.executing_eagerly() and tf.distribute.get_strategy() is strategy
            if traced and not tf.distribute.in_cross_replica_context():
                value = tf.convert_to_tensor(value, variable.dtype)
                if _depends_on_data(value):
                    value = _sum_data_dependent_addends(variable, value, adds)
            return own(value, *args, **kwargs)

        return assign

    for name, adds in (("assign", False), ("assign_add", True), ("assign_sub", True)):
        setattr(variable, name, wrapped(getattr(variable, name), adds))
    return variable


def check_equal_on_replicas(strategy: tf.distribute.Strategy, variables: Iterable[Any]) -> None:
    """Raises if this process's replicas hold different values of an integer variable, as one assigned under a condition may be.

    Args:
        strategy: The strategy.
        variables: Keras variables of a model.

    Raises:
        ConfigError: They do; names the variables.
    """
    faults = []
    for variable in variables:
        value = variable.value
        if not isinstance(value, tf.distribute.DistributedValues) or not value.dtype.is_integer:
            continue
        numbers = [component.numpy().tolist() for component in strategy.experimental_local_results(value)]
        if any(number != numbers[0] for number in numbers):
            faults.append(
                _REFUSED.format(variable.path) + f" The replicas hold {', '.join(map(format_value, numbers))}."
            )
    if faults:
        raise ConfigError(faults)


_REFUSED = (
    "The integer weight {} is assigned what depends on the data, and so on the replica, other than by adding to it. Add to it "
    "(assign_add), which is summed over the replicas, use a metric, a weight of floating-point numbers, which is averaged, or a tf.Variable, of which each replica keeps its own."
)


def _sum_data_dependent_addends(variable: tf.Variable, value: tf.Tensor, adds: bool) -> tf.Tensor:
    """Returns a value of which those parts are summed over the replicas that depend on the data.

    Args:
        variable: To which it is assigned.
        value: On a replica.
        adds: Whether it is added to the variable. Otherwise the variable must be among its parts.
    """
    addends = list(_addends(value))
    handle = tf.compat.v1.get_default_graph().capture(variable.handle)
    held = any(sign > 0 and part.op.type == "ReadVariableOp" and part.op.inputs[0] is handle for sign, part in addends)
    if not (adds or held):
        raise ConfigError(_REFUSED.format(variable.name.partition(":")[0]))
    # Of a type that all devices can sum.
    mine = tf.add_n([tf.cast(part, tf.int64) * sign for sign, part in addends if _depends_on_data(part)])
    examples = batch_splitting.current_example_count()
    counted = mine if examples is None else tf.where(examples > 0, mine, tf.zeros_like(mine))
    total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, counted)
    return tf.cast(tf.cast(value, tf.int64) - mine + total, value.dtype)


def _addends(value: tf.Tensor, sign: int = 1) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields the tensors of which a value is the sum, each with 1, or -1 if it is subtracted."""
    op = value.op
    if op.type in _SUMS or op.type == "Sub" or op.type == "Identity":
        for number, each in enumerate(op.inputs):
            yield from _addends(each, -sign if op.type == "Sub" and number else sign)
    else:
        yield sign, value


def _depends_on_data(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a traced graph may differ between replicas: it comes from data, or from random numbers."""
    pending, seen = [tensor], set()
    while pending:
        each = pending.pop()
        if isinstance(each, EagerTensor) or id(each) in seen:
            continue
        seen.add(id(each))
        op = each.op
        if op.type in _CONSTANT:
            continue
        if op.type == "Placeholder":
            outer = [outside for outside, inside in getattr(op.graph, "captures", ()) if inside is each]
            if not outer:
                return True  # an argument of the function
            pending += outer if each.dtype != tf.resource else []
            continue
        if functions := _functions(op):
            if any("Iterator" in name for name in _operations(op.graph, functions)):
                return True
        elif op.op_def.is_stateful:
            return True
        pending += op.inputs
    return False


def _functions(op: tf.Operation) -> list[str]:
    """Returns the names of the functions that an operation calls, as `tf.cond` does."""
    values = [op.node_def.attr[name] for name in op.node_def.attr]
    return [value.func.name for value in values if value.HasField("func")]


def _operations(graph: tf.Graph, functions: list[str]) -> Iterator[str]:
    """Yields the types of the operations in functions, and in those that they call."""
    pending, seen = list(functions), set()
    while pending:
        name = pending.pop()
        if name in seen or (found := graph_function(graph, name)) is None:
            continue
        seen.add(name)
        for node in found.cached_definition.node_def:
            yield node.op
            pending += [value.func.name for value in node.attr.values() if value.HasField("func")]
