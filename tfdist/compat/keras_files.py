"""Datasets in the files that Keras writes and reads, by parts: Keras' stores pass whole arrays.

A release may move the private names here: tests/architecture/test_keras_internals.py then fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving import saving_lib

_BFLOAT16 = "bfloat16"  # HDF5 does not know it: Keras writes bytes, and the name as an attribute


def new_dataset(store: Any, key: str, shape: Sequence[int], dtype: tf.DType) -> Any:
    """Returns a new HDF5 dataset of an entry of Keras' store; None for a store, shape or dtype that takes only whole arrays."""
    if type(store) is not saving_lib.H5IOStore or dtype.name == _BFLOAT16 or not shape:
        return None
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    return store._h5_entry_group.create_dataset(key, shape, dtype.as_numpy_dtype)


def dataset(store: Any, key: str) -> Any:
    """Returns an array, or a dataset whose slices are arrays, of an entry of Keras' store."""
    get = getattr(saving_lib, "safe_get_h5_dataset", None)  # not in all releases
    if type(store) is not saving_lib.H5IOStore or get is None:
        return store[key]
    found = get(store._h5_entry_group, key)
    if found.attrs.get("dtype") == _BFLOAT16:
        return store[key]
    return found


def through_disk(is_large: Callable[[keras.Model], bool]) -> None:
    """Makes Keras write and read the weights in a `.keras` file of a large model by a file beside it: otherwise they would be in memory."""
    own = saving_lib.is_memory_sufficient

    def is_memory_sufficient(model: keras.Model) -> bool:
        return bool(own(model)) and not is_large(model)

    saving_lib.is_memory_sufficient = is_memory_sufficient
