"""`CachedMap`: a function of rows, whose results are kept; and the digest of the function by which they are found again."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.compat import tf_internals
from tfdist.data.cached_rows import CachedRows
from tfdist.data.graph import nodes
from tfdist.errors import ConfigError, DataError, format_value

_VERSION = "1"  # of the files: other versions have other keys
_RANDOM = re.compile(r"Random|Rng|Multinomial|TruncatedNormal|Stateful(Uniform|StandardNormal)|DistortedBoundingBox")
_NOT_CODE = ("_", "config")  # attributes that begin so: hints, and names that are numbered per process

# Locates the rows of an element: its number -> the block of each row, the row in its block, and further numbers.
Locate = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
Read = Callable[[np.ndarray, np.ndarray], list[np.ndarray]]


class CachedMap:
    """A function of rows that is called on the rows of a block, and whose results are kept.

    Args:
        source: The stored rows, a `RowSource`.
        function: The function of a batch; None keeps the rows themselves.
        place: "memory", or a folder.
        limit: See `CachedRows`.

    Raises:
        ConfigError: The results cannot be kept: the function draws random numbers, calls Python, uses tables, or its rows
            have no fixed shape; or the source has no version.
    """

    def __init__(self, source: Any, function: Callable[..., Structure] | None, place: str, limit: int | None):
        self._source, self._place, self._limit = source, place, limit
        specs = tf.nest.flatten(source.spec)
        self._types = [spec.dtype for spec in specs]
        self._shapes = [spec.shape for spec in specs]

        def of_columns(*columns: tf.Tensor) -> Structure:
            batch = tf.nest.pack_sequence_as(source.spec, columns)
            if function is None:
                return tf.nest.map_structure(tf.identity, batch)
            return function(*batch) if isinstance(batch, tuple) else function(batch)

        signature = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in specs]
        self._function = tf.function(of_columns, input_signature=signature).get_concrete_function()
        if faults := list(_faults(self._function, source)):
            raise ConfigError(faults)
        self._structure = self._function.structured_outputs
        self._results = [tf.TensorSpec(t.shape[1:], t.dtype) for t in tf.nest.flatten(self._structure)]
        self._lock = threading.Lock()
        self._rows: CachedRows | None = None

    def batch(self, number: tf.Tensor, locate: Locate, read: Read, length: int | None) -> tuple[Structure, tf.Tensor]:
        """Returns the results for an element's rows, and the further numbers from `locate`.

        The function runs in the graph of the dataset, not within a call of Python, which would occupy the thread that it needs.

        Args:
            number: The element.
            locate: Locates its rows.
            read: Reads rows of the source.
            length: The number of its rows, if all elements have the same.
        """
        rows = self._open()
        sizes, results = self._source.sizes, [spec.dtype for spec in self._results]

        def typed(columns: list[np.ndarray]) -> list[np.ndarray]:
            return [
                column.view(spec.dtype.as_numpy_dtype).reshape(len(column), *spec.shape)
                if column.size
                else np.zeros((len(column), *spec.shape), spec.dtype.as_numpy_dtype)
                for column, spec in zip(columns, self._results, strict=True)
            ]

        def take(number: np.ndarray) -> list[Any]:
            blocks, indices, counts = locate(number)
            is_complete = bool(rows.has(blocks).all())
            taken = rows.take(blocks, indices) if is_complete else rows.take(blocks[:0], indices[:0])
            return [*typed(taken), counts, np.bool_(is_complete)]

        def missing(number: np.ndarray) -> np.ndarray:
            return rows.missing(locate(number)[0])

        def read_block(block: np.ndarray) -> list[np.ndarray]:
            size = int(sizes[block])
            return read(np.full(size, block, np.int64), np.arange(size))

        def put(block: np.ndarray, *columns: np.ndarray) -> np.int64:
            if lengths := {len(column) for column in columns} - {int(sizes[block])}:
                fault = f"map must return a row for each row. Received: {lengths.pop()} rows for {sizes[block]} rows of a block."
                raise DataError(fault)
            rows.put(int(block), columns)
            return np.int64(0)

        def others(number: np.ndarray) -> list[np.ndarray]:
            """Returns which rows are not kept, and reads these rows."""
            blocks, indices, _ = locate(number)
            is_other = ~rows.has(blocks)
            return [is_other, *read(blocks[is_other], indices[is_other])]

        def merge(number: np.ndarray, is_other: np.ndarray, *mapped: np.ndarray) -> list[np.ndarray]:
            blocks, indices, _ = locate(number)
            kept = typed(rows.take(blocks[~is_other], indices[~is_other]))
            merged = [np.empty((len(blocks), *column.shape[1:]), column.dtype) for column in kept]
            for values, column, computed in zip(merged, kept, mapped, strict=True):
                values[~is_other], values[is_other] = column, computed
            return merged

        def map_columns(columns: list[tf.Tensor]) -> list[tf.Tensor]:
            for column, shape in zip(columns, self._shapes, strict=True):
                column.set_shape([None, *shape])
            return tf.nest.flatten(self._function(*columns))

        def fill(index: tf.Tensor, blocks: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            block = blocks[index]

            def compute() -> tf.Tensor:
                columns = map_columns(tf.numpy_function(read_block, [block], self._types))
                return tf.numpy_function(put, [block, *columns], tf.int64)

            # A parallel element, or another process, may have stored it since.
            is_missing = tf.size(tf.numpy_function(rows.missing, [block], tf.int64)) > 0
            done = tf.cond(is_missing, compute, lambda: tf.constant(0, tf.int64))
            with tf.control_dependencies([done]):
                return index + 1, blocks

        def complete() -> list[tf.Tensor]:
            blocks = tf.ensure_shape(tf.numpy_function(missing, [number], tf.int64), [None])
            filled = tf.while_loop(lambda i, b: i < tf.size(b), fill, [0, blocks], parallel_iterations=1)
            with tf.control_dependencies(filled):
                is_other, *columns = tf.numpy_function(others, [number], [tf.bool, *self._types])
            mapped = tf.cond(
                tf.reduce_any(tf.ensure_shape(is_other, [None])),
                lambda: map_columns(columns),
                lambda: [tf.zeros([0, *spec.shape], spec.dtype) for spec in self._results],
            )
            return list(tf.numpy_function(merge, [number, is_other, *mapped], results))

        *taken, counts, is_complete = tf.numpy_function(take, [number], [*results, tf.int64, tf.bool])
        columns = tf.cond(tf.ensure_shape(is_complete, []), lambda: taken, complete)
        for column, spec in zip(columns, self._results, strict=True):
            column.set_shape([length, *spec.shape])
        return tf.nest.pack_sequence_as(self._structure, columns), counts

    def _open(self) -> CachedRows:
        with self._lock, tf.init_scope():  # a dataset's function is being traced; the digest reads values of variables
            if self._rows is None:
                row_bytes = [spec.shape.num_elements() * spec.dtype.size for spec in self._results]
                source = self._source
                parts = [_VERSION, tf.__version__, source.identity, source.version, repr(source.spec)]
                digest = hashlib.blake2b(repr(parts).encode() + source.sizes.tobytes(), digest_size=16)
                digest.update(_digest(self._function))
                self._rows = CachedRows(source.sizes, row_bytes, self._place, digest.hexdigest(), self._limit)
            return self._rows


def _faults(function: Any, source: Any) -> Iterator[str]:
    """Yields why the results of a traced function cannot be kept."""
    if not source.version:
        yield f"cache needs a source that knows the version of its data: set the attribute version of {type(source).__name__}."
    operations = list(nodes(function.graph))
    if random := sorted({node.op for node in operations if _RANDOM.search(node.op)}):
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
    if any(
        outer.dtype in (tf.resource, tf.variant) and id(outer) not in variables for outer, _ in function.graph.captures
    ):
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


def _digest(function: Any) -> bytes:
    """Returns a digest of the operations and constants of a traced function, which is the same in the next process."""
    definition = function.graph.as_graph_def()
    library = {called.signature.name: called for called in definition.library.function}
    outputs = [tensor.name for tensor in function.outputs]
    arguments: list[str] = []
    digest = hashlib.blake2b(_describe(definition.node, arguments, outputs, library).encode(), digest_size=16)
    variables = {id(variable.handle): variable for variable in function.graph.variables}
    for outer, _ in function.graph.captures:
        values = np.asarray(variables.get(id(outer), outer))
        content = repr(values.tolist()).encode() if values.dtype == object else np.ascontiguousarray(values).tobytes()
        digest.update(f"{values.dtype} {values.shape} ".encode() + content)
    return digest.digest()


def _describe(operations: Any, arguments: list[str], outputs: list[str], library: dict[str, Any]) -> str:
    """Returns a text of operations without their names, which depend on what the process has traced before."""
    numbers = {name: number for number, name in enumerate([*arguments, *(node.name for node in operations)])}

    def reference(name: str) -> str:
        base, _, output = name.lstrip("^").partition(":")
        return f"{'^' * name.startswith('^')}{numbers[base]}:{output}"

    def attribute(value: Any) -> str:
        called = [value.func] if value.HasField("func") else list(value.list.func)
        if not called:
            return str(value.SerializeToString(deterministic=True))
        inner = [library[function.name] for function in called]
        return repr(
            [
                _describe(
                    function.node_def,
                    [argument.name for argument in function.signature.input_arg],
                    [function.ret[output.name] for output in function.signature.output_arg],
                    library,
                )
                for function in inner
            ]
        )

    lines = [
        f"{node.op}({', '.join(map(reference, node.input))}) "
        + repr([(key, attribute(node.attr[key])) for key in sorted(node.attr) if not key.startswith(_NOT_CODE)])
        for node in operations
    ]
    return "\n".join([*lines, f"returns {', '.join(map(reference, outputs))}"])
