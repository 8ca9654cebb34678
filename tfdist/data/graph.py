"""The graph of a dataset: the datasets and functions that it is made from, and the order in which it yields elements."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.compat import tf_internals

# The transformations that determine the order of elements, by TensorFlow's name: the method's name and its numbers. Others, such as
# `map`, `cache` and `prefetch`, keep the order. So one worker may use them alone, or with a different seed.
_METHODS = {
    "Random": ("random", ("seed", "seed2")),
    "Shuffle": ("shuffle", ("buffer_size", "seed", "seed2")),
    "Batch": ("batch", ("batch_size",)),
    "PaddedBatch": ("padded_batch", ("batch_size",)),
    "Repeat": ("repeat", ("count",)),
    "Take": ("take", ("count",)),
    "Skip": ("skip", ("count",)),
    "Shard": ("shard", ("num_shards", "index")),
    "Window": ("window", ("size", "shift", "stride")),
    "Interleave": ("interleave", ("cycle_length", "block_length")),
    "DirectedInterleave": ("sample_from_datasets or choose_from_datasets", ()),
    "GroupByWindow": ("group_by_window", ()),
    "Concatenate": ("concatenate", ()),
    "Filter": ("filter", ()),
    "TakeWhile": ("take_while", ()),
    "Unbatch": ("unbatch", ()),
}

_LEAST_ROWS = 16  # of tensors in functions that are compared; smaller ones may be seeds or options of one worker


def walk(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and its input datasets, except datasets that its functions create."""
    yield dataset
    for source in tf_internals.inputs(dataset):
        yield from walk(source)


def nodes(graph: tf.Graph) -> Iterator[tf.compat.v1.NodeDef]:
    """Yields the operations of a graph, and of all functions that it calls."""
    for scope in _scopes(graph):
        yield from scope.values()


def tensors(dataset: tf.data.Dataset) -> list[Structure]:
    """Returns the values in memory from which a dataset makes its elements, in an order that is the same in all processes.

    These are the tensors of `from_tensor_slices` and `from_tensors`, and tensors of several rows in functions, such as a table that `map` gathers
    from. Of names, which are strings without a space, only the number is returned: tasks may have the same rows in files of other names.
    """
    found: list[Structure] = []
    for node in walk(dataset):
        found.extend(tf_internals.dataset_tensors(node))
        for function in tf_internals.dataset_functions(node):
            found.extend(value for value in function.captured_inputs if _has_rows(value.shape))
            found.extend(_tables(function.graph))
    return [_without_names(value) for value in found if value.dtype not in (tf.variant, tf.resource)]


def _tables(graph: tf.Graph) -> Iterator[np.ndarray]:
    for node in nodes(graph):
        if node.op == "Const" and node.attr["dtype"].type != tf.string:
            constant = node.attr["value"].tensor
            if _has_rows(tf.TensorShape(constant.tensor_shape)):
                yield tf.make_ndarray(constant)


def _has_rows(shape: tf.TensorShape) -> bool:
    return bool(shape.rank and shape[0] is not None and shape[0] >= _LEAST_ROWS)


def _without_names(value: Structure) -> Structure:
    if value.dtype != tf.string:
        return value
    has_text = tf.reduce_any(tf.strings.regex_full_match(value, r"(?s).*\s.*"))
    if has_text:
        return value
    return tf.zeros(tf.shape(value), tf.int8)


def describe_order(dataset: tf.data.Dataset) -> list[str]:
    """Returns the transformations that determine the order of elements, from the source on, with their numbers and seeds.

    It reads only the graph. It does not see the values of the source (`tensors` returns those in memory), numbers and
    transformations within functions, or random numbers that `map` draws.

    Args:
        dataset: The dataset.

    Returns:
        One text for each transformation, the same in all processes that run the same script:

            describe_order(tf.data.Dataset.range(9).shuffle(9, seed=3).batch(2))
            # ["shuffle(buffer_size=9, seed=..., seed2=3)", "batch(batch_size=2)"]
    """
    transformations = []
    for node in walk(dataset):
        kind = tf_internals.dataset_kind(node)
        method, names = _METHODS.get(kind, (kind.lower(), ()))
        parts = [f"{name}={number}" for name, number in tf_internals.dataset_numbers(node, names).items()]
        seeds = sorted(_function_seeds(node, kind in ("Filter", "TakeWhile")))
        if seeds:
            parts.append(f"seeds in its function={seeds}")
        if parts or kind in _METHODS:
            transformations.append(f"{method}({', '.join(parts)})")
    return transformations[::-1]


def _function_seeds(dataset: tf.data.Dataset, selects: bool) -> Iterator[list[int]]:
    """Yields the seeds of datasets in the functions of `dataset`; with `selects` also the seeds of random operations there."""
    for function in tf_internals.dataset_functions(dataset):
        for scope in _scopes(function.graph):
            for node in scope.values():
                definition = tf_internals.operation_definition(node.op)
                if "Dataset" in node.op and definition:
                    names = [argument.name for argument in definition.input_arg]
                    inputs = [name for name in node.input if not name.startswith("^")]  # without control inputs
                    # An argument may be a list of inputs; no dataset has one before its seeds.
                    pairs = zip(names, inputs, strict=False)
                    seeds = [name for argument, name in pairs if argument in ("seed", "seed2")]
                    if seeds:
                        yield sorted({number for name in seeds for number in _constants(scope, name)} - {0, 2**31 - 1})
                elif selects and "seed2" in node.attr:
                    yield [int(node.attr[name].i) for name in ("seed", "seed2")]


def _scopes(graph: tf.Graph) -> Iterator[dict[str, tf.compat.v1.NodeDef]]:
    """Yields the operations of a graph, and of each function that it calls, by name."""
    definition = graph.as_graph_def()
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
        yield {node.name: node for node in nodes}


def _constants(scope: dict[str, tf.compat.v1.NodeDef], name: str) -> list[int]:
    """Returns the integer constants from which a seed is computed: TensorFlow replaces the seeds 0, 0 by 0, 2**31 - 1."""
    node = scope.get(name.split(":")[0])
    if node is None:  # an argument of the function
        return []
    if node.op == "Const":
        value = tf.make_ndarray(node.attr["value"].tensor)
        if value.shape == () and value.dtype.kind == "i":
            return [int(value)]
        return []
    return [number for source in node.input for number in _constants(scope, source.lstrip("^"))]
