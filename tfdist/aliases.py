"""Names of types for annotations. Types that Python cannot express, such as a structure of tensors, are `Any` for a type checker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import random

    import keras
    import numpy as np
    import tensorflow as tf

# Data
Structure: TypeAlias = Any  # a tensor, or nested lists, tuples and dicts of tensors: a batch, inputs, outputs
Spec: TypeAlias = Any  # a structure of tf.TypeSpec, like `element_spec`
Data: TypeAlias = Any  # the `x` of `fit`: arrays, a dataset, a PyDataset, a generator, or a function for each worker
DataAdapter: TypeAlias = Any  # Keras' adapter of data, of a private class
DataIterator: TypeAlias = Any  # TensorFlow's iterator of a dataset or of a distributed dataset

# Loops
Logs: TypeAlias = Any  # names to numbers or tensors, or None; a model's own train_step may return another structure
Callbacks: TypeAlias = (
    Any  # the `callbacks` of `fit`: a keras.callbacks.Callback, a sequence of them, a CallbackList, or None
)
Function: TypeAlias = Callable[..., Any]
StepFunction: TypeAlias = (
    Any  # the function that Keras calls for each execution of steps: `model.train_function` or `test_function`
)
Step: TypeAlias = Callable[[Structure], Logs]  # `model.train_step`, `test_step` or `predict_step`, for one batch

# Updates
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"  # on several replicas, a value per replica
Variables: TypeAlias = "Sequence[keras.Variable]"

# Files and states
RandomGenerator: TypeAlias = (
    "np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random | keras.random.SeedGenerator"
)
Json: TypeAlias = Any  # plain values: dicts, lists, strings, numbers, booleans, None

# TensorFlow
Launcher: TypeAlias = Any  # TensorFlow's object that launches the collectives of one device
