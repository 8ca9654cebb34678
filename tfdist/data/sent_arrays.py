"""Arrays of a dataset function that runs in another process, as inputs of its graph instead of constants.

A graph holds arrays as constants: in one message of protobuf, which has 2 GB at most, and once more for each worker. A tensor that
exists before the graph is traced is an argument of it. TensorFlow sends it to a worker once, in one message: so it is in pieces.
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

PIECE = 2**28  # bytes of a tensor at most, if an example has not more; sending one takes several times its size
LARGEST = 2_000_000_000  # bytes; of one message of protobuf, such as a tensor or a graph
SMALLEST = 2**16  # bytes of an array that `from_tensor_slices` does not leave to the graph

_Cut = tuple[int, Sequence[tf.Tensor]]  # rows of each piece but the last, and the pieces
# The arrays of the workers that are traced now, by id, and what was made of them for the worker before.
_Made = dict[tuple[int, int], tuple[Any, _Cut]]
_made: contextvars.ContextVar[_Made | None] = contextvars.ContextVar("made", default=None)


@contextlib.contextmanager
def sent(made: _Made) -> Iterator[None]:
    """Within it, `cut` cuts, and `tf.data.Dataset.from_tensor_slices` and `from_tensors` take large arrays so, too.

    Args:
        made: Tensors made of arrays by earlier calls. Empty at first.
    """
    token = _made.set(made)
    try:
        with tf_internals.replacing_dataset_sources(_slices, _whole):
            yield
    finally:
        _made.reset(token)


def cut(array: Structure, rows: int | None = None) -> _Cut:
    """Returns `array` as tensors of so many rows each, outside of all graphs; as one where none is sent.

    Args:
        array: An array or tensor `[examples, ...]`.
        rows: How many; by default as many as `PIECE` has.
    """
    made = _made.get()
    with tf.init_scope():
        if made is None or not _can_be_cut(array):
            return 0, [array if tf.is_tensor(array) else tf.constant(array)]
        rows = rows or _rows(array)
        if (known := made.get((id(array), rows))) and known[0]() is array:
            return known[1]
        pieces = rows, [tf.constant(array[start : start + rows]) for start in range(0, len(array), rows)]
    made[id(array), rows] = weakref.ref(array), pieces
    return pieces


def gather(pieces: _Cut, indices: tf.Tensor) -> tf.Tensor:
    """Returns the rows `indices`, in their order."""
    rows, tensors = pieces
    if len(tensors) == 1:
        return tf.gather(tensors[0], indices)
    which = tf.cast(indices // rows, tf.int32)
    within = tf.dynamic_partition(indices % rows, which, len(tensors))
    places = tf.dynamic_partition(tf.range(tf.size(indices)), which, len(tensors))
    stitched = tf.dynamic_stitch(places, [tf.gather(*pair) for pair in zip(tensors, within, strict=True)])
    return tf.ensure_shape(stitched, [*indices.shape, *tensors[0].shape[1:]])


def _can_be_cut(array: Structure) -> bool:
    return isinstance(array, (np.ndarray, tf_internals.EagerTensor)) and array.ndim > 0 and len(array) > 0


def _bytes(array: Structure) -> int:
    return int(np.prod(array.shape, dtype=np.int64)) * (
        array.dtype.size if tf.is_tensor(array) else array.dtype.itemsize
    )


def _rows(array: Structure) -> int:
    return min(max(1, PIECE // max(1, _bytes(array) // len(array))), len(array))


def _is_large(leaf: Structure) -> bool:
    return _can_be_cut(leaf) and _bytes(leaf) >= SMALLEST


def _slices(original: Callable[..., tf.data.Dataset], tensors: Structure, name: str | None = None) -> tf.data.Dataset:
    leaves = tf_internals.dataset_leaves(tensors)
    large = [leaf for leaf in leaves if _is_large(leaf)]
    if _made.get() is None or not large:
        return original(tensors, name=name)
    if len({len(leaf) if _can_be_cut(leaf) else None for leaf in leaves}) > 1:
        return original(_replaced(tensors, leaves), name=name)
    columns = [cut(leaf, min(map(_rows, large)))[1] for leaf in leaves]
    datasets = [original(tf_internals.dataset_structure(tensors, row), name=name) for row in zip(*columns, strict=True)]
    whole = datasets[0]
    for piece in datasets[1:]:
        whole = whole.concatenate(piece)
    return whole


def _whole(original: Callable[..., tf.data.Dataset], tensors: Structure, name: str | None = None) -> tf.data.Dataset:
    if _made.get() is None:
        return original(tensors, name=name)
    return original(_replaced(tensors, tf_internals.dataset_leaves(tensors)), name=name)


def _replaced(tensors: Structure, leaves: Sequence[Structure]) -> Any:
    """Returns `tensors` with each large array as one tensor, if one message can hold it: a graph says that it cannot either."""
    new = [cut(leaf, len(leaf))[1][0] if _is_large(leaf) and _bytes(leaf) < LARGEST else leaf for leaf in leaves]
    return tf_internals.dataset_structure(tensors, new)
