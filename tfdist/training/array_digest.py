"""Digests by which workers compare their input arrays. Nearly equal arrays have nearly equal digests."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdist.aliases import Data, Structure

_ROWS = 128  # sampled from each array, evenly spaced
_ROW_VALUES = 256  # sampled from each of these rows, evenly spaced


def describe(data: Data) -> str:
    """Returns the types and shapes of the arrays in a structure, and their first values; empty without arrays."""
    return "; ".join(f"{_kind(array)}{_first(array)}" for array in _arrays(data))


def shapes(data: Data) -> str:
    """Returns the types and shapes of the arrays in a structure; empty without arrays."""
    return "; ".join(map(_kind, _arrays(data)))


def kinds(data: Data) -> str:
    """Returns the types of the arrays in a structure, and the shapes of their rows."""
    return "; ".join(f"{_dtype(array)} {tuple(array.shape[1:])}" for array in _arrays(data))


def digest(data: Data) -> float:
    """Returns a digest of sampled rows of each array in a structure; 0 without arrays.

    Numeric rows are multiplied by random signs, the same on all workers, and summed. Rounding changes this digest little.
    """
    return sum((number + 1) * _digest(array) for number, array in enumerate(_arrays(data)))


def _arrays(data: Data) -> Iterator[Structure]:
    for leaf in tf.nest.flatten(data):
        if getattr(leaf, "shape", None) is not None and len(leaf.shape):
            yield leaf


def _digest(array: Structure) -> float:
    values = _sample(array)
    if values.dtype.kind not in "biufc":
        return 1000 * zlib.crc32(repr(values.tolist()).encode()) / 2**32
    if values.dtype.kind == "c":
        values = values.view(values.real.dtype)
    values = np.nan_to_num(values.astype(np.float64))
    norm = float(np.linalg.norm(values))
    if not norm:
        return 0.0
    signs = np.random.Generator(np.random.PCG64(1)).integers(0, 2, len(values)) * 2 - 1
    return float(signs @ values) / norm + math.log(norm)


def _sample(array: Structure) -> np.ndarray:
    """Returns values of evenly spaced rows as a flat array."""
    if isinstance(array, tf.SparseTensor):
        return _sample(array.values)
    if isinstance(array, tf.RaggedTensor):
        return _sample(array.flat_values)
    if hasattr(array, "tocsr"):  # of SciPy
        return _sample(array.tocsr().data)
    if not array.shape[0]:
        return np.zeros(0)
    rows = np.unique(np.linspace(0, int(array.shape[0]) - 1, _ROWS).astype(np.int64))
    if hasattr(array, "iloc"):  # of pandas
        taken = array.iloc[rows].to_numpy()
    elif tf.is_tensor(array):
        taken = tf.gather(array, rows).numpy()
    elif hasattr(array, "detach"):  # of PyTorch
        taken = array.detach()[rows].cpu().numpy()
    elif isinstance(array, np.ndarray):
        # Rows are views: only the sampled values are copied, or read from a memory map.
        size = max(array.size // len(array), 1)
        return np.concatenate([array[row].reshape(-1)[:: -(-size // _ROW_VALUES)] for row in rows])
    else:
        taken = np.asarray(array[rows])
    taken = taken.reshape(len(rows), -1)
    return taken[:, :: -(-max(taken.shape[1], 1) // _ROW_VALUES)].ravel()


def _kind(array: Structure) -> str:
    return f"{_dtype(array)} {tuple(array.shape)}"


def _dtype(array: Structure) -> str:
    dtype = getattr(array, "dtype", None)
    return str(getattr(dtype, "name", dtype) or type(array).__name__)


def _first(array: Structure) -> str:
    values = _sample(array)[:1]
    if not len(values):
        return ""
    if values.dtype.kind in "biuf":
        return f" from {values[0]:g}"
    return f" from {values[0]!r}"
