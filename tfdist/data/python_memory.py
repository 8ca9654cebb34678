"""Copies what Python code gives a dataset, so that no operation writes into the arrays of that code."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.data.graph import walk
from tfdist.data.random_state import python_functions


def copy_python_data(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose elements do not share memory with arrays of Python code, if such code makes the dataset.

    TensorFlow uses an aligned NumPy array (tensorflow/python/lib/core/py_func.cc) where it is, and counts no reference but its own: an
    operation with the last one of these may write its result there, into a slice of the array that a `PyDataset` keeps.
    """
    if not any(True for each in walk(dataset) for _ in python_functions(each)):
        return dataset

    @tf.autograph.experimental.do_not_convert
    def copy(*element: Any) -> Any:
        batch = element if isinstance(dataset.element_spec, tuple) else element[0]
        return tf.nest.map_structure(_copy, batch, expand_composites=True)

    return dataset.map(copy)


def _copy(tensor: tf.Tensor) -> tf.Tensor:
    in_place = tensor.dtype.is_integer or tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype.is_bool
    return tf.raw_ops.DeepCopy(x=tensor) if in_place else tensor
