"""What a dataset is made from: its inputs, functions and operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat import tf_internals


def walk(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and the datasets it is made from, except those that its functions make."""
    yield dataset
    for each in tf_internals.inputs(dataset):
        yield from walk(each)


def functions(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the traced functions of a dataset itself, as that of `map`."""
    yield from tf_internals.dataset_functions(dataset)


def nodes(graph: tf.Graph) -> Iterator[tf.compat.v1.NodeDef]:
    """Yields the operations of a graph, and of all functions that it calls."""
    definition = graph.as_graph_def()
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def
