"""Functions of tensors that XLA compiles, so that a codec makes few passes over the values."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist.aliases import Function

# Minimum number of elements. XLA compiles each shape for 0.1 s, which smaller tensors do not save within thousands of steps.
LEAST = 2**16


def compiled(function: Function) -> Function:
    """Returns a function that XLA compiles on CPUs if an argument has at least `LEAST` elements.

    XLA compiles once for each tuple of shapes in a process, however many graphs call the function. Other devices, builds of
    TensorFlow without XLA and small arguments get ordinary operations.

    Args:
        function: Maps tensors of static shapes to tensors, without state and without shapes that depend on values. For equal bits
            with and without XLA it must not add an inexact product: XLA fuses both operations, which rounds once.
    """
    traces: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(function)
    def call(*tensors: tf.Tensor) -> Any:
        if max(tensor.shape.num_elements() or 0 for tensor in tensors) < LEAST or not _compiles():
            return function(*tensors)
        specs = tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)
        if specs not in traces:
            with tf.init_scope():  # so that the trace is independent of the model's graph
                traces[specs] = tf.function(function, autograph=False, jit_compile=True).get_concrete_function(*specs)
        return traces[specs](*tensors)

    return call


def _compiles() -> bool:
    """Returns whether XLA compiles for this process's devices and for the graph that is being traced."""
    with tf.init_scope():
        return tf.executing_eagerly() and has_xla()  # a separate tf.Graph is never run (`bytes_per_step`)


@functools.cache
def has_xla() -> bool:
    """Returns whether all devices are CPUs, and TensorFlow has XLA for them."""
    if any(device.device_type != "CPU" for device in tf.config.list_logical_devices()):
        return False
    try:
        tf.function(lambda: tf.constant(1) + 1, autograph=False, jit_compile=True)()
    except (tf.errors.OpError, ValueError):
        return False
    return True
