"""Functions of tensors that XLA compiles, so that a codec's steps become few passes over the numbers."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist.aliases import Function

LEAST = 2**16  # numbers; XLA takes 0.1 s for each shape, which fewer would not gain back within thousands of steps


def compiled(function: Function) -> Function:
    """Returns a function that computes the same by XLA on CPUs, where its arguments have enough numbers.

    XLA compiles once for each tuple of shapes in a process, however many graphs call the function. Other devices, builds of
    TensorFlow without XLA and small arguments get ordinary operations.

    Args:
        function: Of tensors of static shapes, to tensors; without state, and without a shape that depends on values. Where bits
            count, it must not round a product that it then adds: XLA makes one operation of both, which rounds once.
    """
    traces: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(function)
    def call(*tensors: tf.Tensor) -> Any:
        if max(tensor.shape.num_elements() or 0 for tensor in tensors) < LEAST or not _compiles():
            return function(*tensors)
        specs = tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)
        if specs not in traces:
            with tf.init_scope():  # so that the trace belongs to no graph of a model
                traces[specs] = tf.function(function, autograph=False, jit_compile=True).get_concrete_function(*specs)
        return traces[specs](*tensors)

    return call


def _compiles() -> bool:
    """Returns whether XLA compiles for the devices of this process, and for the graph that is being made."""
    with tf.init_scope():
        return tf.executing_eagerly() and _has_xla()  # a tf.Graph of its own only plans


@functools.cache
def _has_xla() -> bool:
    """Returns whether all devices are CPUs, and TensorFlow has XLA for them."""
    if any(device.device_type != "CPU" for device in tf.config.list_logical_devices()):
        return False
    try:
        tf.function(lambda: tf.constant(1) + 1, autograph=False, jit_compile=True)()
    except (tf.errors.OpError, ValueError):
        return False
    return True
