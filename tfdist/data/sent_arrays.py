"""Arrays of a dataset function that runs in another process, passed as inputs of its graph instead of constants.

A graph holds arrays as constants: in one protobuf message of at most 2 GB, and once more for each worker. A tensor that exists
before the graph is traced becomes an input of the graph. TensorFlow sends an input to a worker once, in one message, so large
arrays are cut into pieces.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.compat import tf_internals

PIECE = 2**28  # largest piece in bytes, if an example is not larger; sending a piece needs several times its size
LARGEST = 2_000_000_000  # bytes; limit of a protobuf message, such as a tensor or a graph
SMALLEST = 2**16  # bytes; `from_tensor_slices` leaves smaller arrays in the graph

_Cut = tuple[int, Sequence[tf.Tensor]]  # rows of each piece except the last, and the pieces
# Pieces of the arrays in the dataset functions that are traced now, by the id of the array and the rows; shared by all workers.
_Made = dict[tuple[int, int], tuple[Any, _Cut]]
_made: contextvars.ContextVar[_Made | None] = contextvars.ContextVar("made", default=None)


@contextlib.contextmanager
def sent(made: _Made) -> Iterator[None]:
    """Makes `cut`, `tf.data.Dataset.from_tensor_slices` and `from_tensors` cut large arrays within the context.

    Args:
        made: The pieces of arrays that earlier calls have cut. Empty at first.
    """
    token = _made.set(made)
    try:
        with tf_internals.replacing_dataset_sources(_slices, _tensors):
            yield
    finally:
        _made.reset(token)


def cut(array: Structure, rows: int | None = None) -> _Cut:
    """Returns `array` as tensors of `rows` rows each, outside of all graphs. Outside of `sent`, returns one tensor.

    Args:
        array: An array or tensor `[examples, ...]`.
        rows: Rows of a tensor; by default as many as fit in `PIECE`.
    """
    made = _made.get()
    with tf.init_scope():
        if made is None or not _can_be_cut(array):
            if not tf.is_tensor(array):
                array = tf.constant(array)
            return 0, [array]
        rows = rows or _rows(array)
        known = made.get((id(array), rows))
        # The address may be that of an array that was freed since then.
        if known and known[0]() is array:
            return known[1]
        pieces = rows, [tf.constant(array[start : start + rows]) for start in range(0, len(array), rows)]
    made[id(array), rows] = weakref.ref(array), pieces
    return pieces


def gather(pieces: _Cut, indices: tf.Tensor) -> tf.Tensor:
    """Returns the rows at `indices`, in the order of `indices`."""
    rows, tensors = pieces
    if len(tensors) == 1:
        return tf.gather(tensors[0], indices)
    # Each piece gives its rows, which the stitch puts in the order of `indices`.
    which = tf.cast(indices // rows, tf.int32)
    within = tf.dynamic_partition(indices % rows, which, len(tensors))
    positions = tf.dynamic_partition(tf.range(tf.size(indices)), which, len(tensors))
    stitched = tf.dynamic_stitch(positions, [tf.gather(*pair) for pair in zip(tensors, within, strict=True)])
    return tf.ensure_shape(stitched, [*indices.shape, *tensors[0].shape[1:]])


def _can_be_cut(array: Structure) -> bool:
    return isinstance(array, (np.ndarray, tf_internals.EagerTensor)) and array.ndim > 0 and len(array) > 0


def _bytes(array: Structure) -> int:
    items = int(np.prod(array.shape, dtype=np.int64))
    if tf.is_tensor(array):
        return items * array.dtype.size
    return items * array.dtype.itemsize


def _rows(array: Structure) -> int:
    return min(max(1, PIECE // max(1, _bytes(array) // len(array))), len(array))


def _is_large(leaf: Structure) -> bool:
    return _can_be_cut(leaf) and _bytes(leaf) >= SMALLEST


def _slices(original: Callable[..., tf.data.Dataset], tensors: Structure, name: str | None = None) -> tf.data.Dataset:
    leaves = tf_internals.dataset_leaves(tensors)
    large = [leaf for leaf in leaves if _is_large(leaf)]
    if _made.get() is None or not large:
        return original(tensors, name=name)
    # Arrays that are cut must have rows for the same pieces.
    if not all(_can_be_cut(leaf) and len(leaf) == len(large[0]) for leaf in leaves):
        return original(_replaced(tensors, leaves), name=name)
    columns = [cut(leaf, min(map(_rows, large)))[1] for leaf in leaves]
    datasets = [original(tf_internals.dataset_structure(tensors, row), name=name) for row in zip(*columns, strict=True)]
    joined = datasets[0]
    for piece in datasets[1:]:
        joined = joined.concatenate(piece)
    return joined


def _tensors(original: Callable[..., tf.data.Dataset], tensors: Structure, name: str | None = None) -> tf.data.Dataset:
    if _made.get() is None:
        return original(tensors, name=name)
    return original(_replaced(tensors, tf_internals.dataset_leaves(tensors)), name=name)


def _replaced(tensors: Structure, leaves: Sequence[Structure]) -> Any:
    """Returns `tensors` with each large array as one tensor. Keeps an array that exceeds one message: TensorFlow raises its own error."""
    new = []
    for leaf in leaves:
        if _is_large(leaf) and _bytes(leaf) < LARGEST:
            _, (leaf,) = cut(leaf, len(leaf))
        new.append(leaf)
    return tf_internals.dataset_structure(tensors, new)
