"""Lookups in the large tables of `keras.layers.Embedding`, which read the rows of a batch.

Keras reads the whole table. TensorFlow then copies it in each step, because its rows are updated in place, and a parameter server sends it to
the worker.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfdist.aliases import Function
from tfdist.compat import keras_internals
from tfdist.layers.table import MIN_ROWS


def look_up_rows(model: keras.Model) -> None:
    """Makes a model's embeddings with large tables read rows, in place."""
    for layer in keras_internals.layers(model):
        if type(layer) is keras.layers.Embedding and "call" not in vars(layer) and layer.input_dim >= MIN_ROWS:
            layer.call = functools.partial(look_up, layer, layer.call)


def look_up(layer: keras.layers.Embedding, call: Function, inputs: tf.Tensor) -> tf.Tensor:
    """Returns the rows as Keras' `call` does, which also takes sparse and ragged ids, a table with LoRA, and a small one."""
    if layer.lora_enabled or not isinstance(inputs, tf.Tensor) or layer.input_dim < MIN_ROWS:
        return call(inputs)
    rows = tf.gather(keras_internals.uncast_value(layer.embeddings), row_numbers(layer, inputs))
    return tf.cast(rows, layer.compute_dtype)


def row_numbers(layer: keras.layers.Embedding, inputs: tf.Tensor) -> tf.Tensor:
    """Returns the rows that an embedding's inputs name, where negative numbers count from the end, as integers."""
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    return tf.where(ids < 0, ids + layer.input_dim, ids)
