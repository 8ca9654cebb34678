"""The identity of a function of rows: whether its results can be kept, and a digest by which they are found again."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import tf_internals
from tfdist.data.graph import nodes
from tfdist.errors import format_value

_RANDOM = re.compile(r"Random|Rng|Multinomial|TruncatedNormal|Stateful(Uniform|StandardNormal)|DistortedBoundingBox")
_NOT_CODE = ("_", "config")  # attributes that begin so: hints, and names that are numbered per process


def cache_faults(function: Any) -> Iterator[str]:
    """Yields why the results of a traced function cannot be kept."""
    operations = list(nodes(function.graph))
    random = sorted({node.op for node in operations if _RANDOM.search(node.op)})
    if random:
        yield (
            f"map draws random numbers ({random[0]}), and a cache would repeat them in each epoch. Put augmentation into layers at "
            "the beginning of the model (such as keras.layers.RandomFlip), or train without cache."
        )
    elif any(node.op.startswith("Assign") for node in operations):
        yield "map changes a variable, and with a cache it runs only once. Use a map without state, or train without cache."
    if any(tf_internals.is_python_call(node) for node in operations):
        yield (
            "map calls Python (tf.numpy_function or tf.py_function), whose changes a cache would not see. Use TensorFlow operations, or "
            "train without cache."
        )
    variables = {id(variable.handle) for variable in function.graph.variables}
    captured = [outer for outer, _ in function.graph.captures if id(outer) not in variables]
    if any(outer.dtype in (tf.resource, tf.variant) for outer in captured):
        yield "map uses a table or another object whose changes a cache would not see. Look values up in the model instead."
    for result in tf.nest.flatten(function.structured_outputs):
        if (
            not isinstance(result, tf.Tensor)
            or result.dtype in (tf.string, tf.variant, tf.resource)
            or not result.shape.rank
            or not result.shape[1:].is_fully_defined()
        ):
            yield (
                "cache needs rows of numbers of a fixed shape: decode and resize them in map, and set shapes with tf.ensure_shape. "
                f"Received: {format_value(result)}."
            )


def digest(function: Any) -> str:
    """Returns a digest of the operations and constants of a traced function, which is the same in the next process."""
    definition = function.graph.as_graph_def()
    library = {called.signature.name: called for called in definition.library.function}
    outputs = [tensor.name for tensor in function.outputs]
    arguments: list[str] = []
    hashed = hashlib.blake2b(_describe(definition.node, arguments, outputs, library).encode(), digest_size=16)
    variables = {id(variable.handle): variable for variable in function.graph.variables}
    for outer, _ in function.graph.captures:
        values = np.asarray(variables.get(id(outer), outer))
        content = values.tobytes()
        if values.dtype == object:  # the bytes of object arrays are addresses
            content = repr(values.tolist()).encode()
        hashed.update(f"{values.dtype} {values.shape} ".encode() + content)
    return hashed.hexdigest()


def _describe(operations: Any, arguments: list[str], outputs: list[str], library: dict[str, Any]) -> str:
    """Returns a text of operations without their names, which depend on what the process has traced before."""
    numbers = {name: number for number, name in enumerate([*arguments, *(node.name for node in operations)])}

    def reference(name: str) -> str:
        control = "^" if name.startswith("^") else ""
        base, _, output = name.lstrip("^").partition(":")
        return f"{control}{numbers[base]}:{output}"

    def attribute(value: Any) -> str:
        called = list(value.list.func)
        if value.HasField("func"):
            called = [value.func]
        if not called:
            return str(value.SerializeToString(deterministic=True))
        # The names of functions are numbered per process, so their bodies stand for them.
        described = []
        for name in called:
            function = library[name.name]
            parameters = [argument.name for argument in function.signature.input_arg]
            results = [function.ret[output.name] for output in function.signature.output_arg]
            described.append(_describe(function.node_def, parameters, results, library))
        return repr(described)

    lines = [
        f"{node.op}({', '.join(map(reference, node.input))}) "
        + repr([(key, attribute(node.attr[key])) for key in sorted(node.attr) if not key.startswith(_NOT_CODE)])
        for node in operations
    ]
    return "\n".join([*lines, f"returns {', '.join(map(reference, outputs))}"])
