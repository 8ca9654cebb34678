"""Layers of which each worker of a model group computes a part, as in Megatron-LM. Other layers read whole values (`strategies/mesh.py`).

A layer whose kernel is split along an output dimension (by columns) computes a part of its outputs, and a layer whose kernel is split along
an input dimension (by rows) reads a part of its inputs. Between such a pair, activations stay parts: within an attention layer, and where the
graph of a model shows the pair. Elsewhere parts are gathered.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.aliases import Function, Structure
from tfdist.compat import keras_internals, laid_out
from tfdist.layers import row_lookups
from tfdist.layers.group_exchanges import GroupExchanges
from tfdist.replicas import step_context
from tfdist.runtime.log import logger
from tfdist.step import split_logits

_ELEMENTWISE = {
    getattr(keras.activations, name)
    for name in (
        *("elu", "exponential", "gelu", "hard_sigmoid", "hard_silu", "leaky_relu", "linear", "log_sigmoid", "mish"),
        *("relu", "relu6", "selu", "sigmoid", "silu", "softplus", "softsign", "tanh"),
    )
}
_PROJECTIONS = (keras.layers.Dense, keras.layers.EinsumDense)
# What may stand between a layer by columns and one by rows.
_BETWEEN = (
    *(keras.layers.Activation, keras.layers.Dropout, keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU),
    *(keras.layers.Multiply, keras.layers.Add),
)
_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


@dataclasses.dataclass(frozen=True)
class _Region:
    """The layers that return parts while a model or an attention layer runs.

    Attributes:
        axes: The axis of the parts that a layer returns, counted from the last one, by the layer's id.
        is_entered: Whether the inputs are `shared` already.
    """

    axes: dict[int, int] = dataclasses.field(default_factory=dict)
    is_entered: bool = False


_region: contextvars.ContextVar[_Region | None] = contextvars.ContextVar("region", default=None)


def split_layers(model: keras.Model) -> None:
    """Makes each worker compute its part of a model's layers, in place, if a mesh of workers splits their variables."""
    mesh = model.distribute_strategy.mesh
    if mesh is not None and mesh.group.processes > 1:
        _Splitting(GroupExchanges(mesh.group, mesh.group_ranks.rank)).install(model)
        split_logits.give_logits_to_metrics(model)


class _Splitting:
    """The calls that replace those of layers."""

    def __init__(self, group: GroupExchanges):
        self._group = group
        self._calls: dict[type, Function] = {
            **dict.fromkeys(_PROJECTIONS, self._project),
            keras.layers.Embedding: self._look_up,
            keras.layers.Dropout: self._drop,
            keras.Sequential: self._run,
            **dict.fromkeys(_ATTENTION, self._attend),
        }
        self._notified: set[str] = set()  # paths of layers

    def install(self, model: keras.layers.Layer) -> None:
        """Replaces the `call` of layers whose computation can be split, and of models whose graph shows pairs."""
        for layer in keras_internals.layers(model):
            call = self._calls.get(type(layer))
            if call is None and keras_internals.graph_calls(layer):
                call = self._run
            if call is not None and "call" not in vars(layer):
                layer.call = functools.partial(call, layer, layer.call)

    def _run(self, model: keras.Model, call: Function, *args: Any, **kwargs: Any) -> Structure:
        """Runs a functional or sequential model, in whose graph activations stay parts between pairs of layers."""
        is_in_step = _is_in_step()
        takes_parts = is_in_step and split_logits.takes_parts(model, self._group.size)
        axes, has_split_logits = _pairs(model, takes_parts) if is_in_step else ({}, False)
        for layer in model.layers:
            if axes and type(layer) is keras.layers.Dense:
                layer.input_spec = keras.layers.InputSpec(min_ndim=2)  # its inputs may be parts
        with _within(_Region(axes)):
            outputs = call(*args, **kwargs)
        step = step_context.current()
        if has_split_logits and step is not None:
            (logits,) = tf.nest.flatten(outputs)
            step.split_logits = logits, self._group
        return outputs

    def _project(self, layer: Any, call: Function, inputs: tf.Tensor, **kwargs: Any) -> tf.Tensor:
        """Returns the outputs of a Dense or EinsumDense layer, or in a region this worker's part of them."""
        split = _split_of(layer) if _is_in_step() else None
        if split is None:
            return call(inputs, **kwargs)
        region = _region.get() or _Region()
        if split.by_columns:
            if not region.is_entered:
                inputs = self._group.shared(inputs)
            outputs = self._product(layer, inputs)
            if layer.bias is not None:
                outputs = outputs + self._bias_part(layer, split)
            if id(layer) not in region.axes:
                outputs = self._group.whole(outputs, split.axis)
        else:
            if inputs.shape[split.axis] == split.size:
                inputs = self._group.part(inputs, split.axis)
            outputs = self._group.total(self._product(layer, inputs))
            if layer.bias is not None:
                outputs = keras.ops.add(outputs, layer.bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    def _product(self, layer: Any, inputs: tf.Tensor) -> tf.Tensor:
        if isinstance(layer, keras.layers.Dense):
            return keras.ops.matmul(inputs, layer.kernel.part)
        return keras.ops.einsum(layer.equation, inputs, layer.kernel.part)

    def _bias_part(self, layer: Any, split: _Split) -> tf.Tensor:
        bias = layer.bias
        axis = split.axis + len(bias.shape)
        if laid_out.is_laid_out(bias) and bias.holder.axis == axis:
            return bias.part
        value = tf.convert_to_tensor(bias.value)
        if axis < 0 or bias.shape[axis] == 1:  # the same for all parts
            return self._group.shared(value)
        return self._group.part(value, axis)

    def _drop(self, layer: Any, call: Function, inputs: tf.Tensor, training: Any = False) -> tf.Tensor:
        """Returns a part of Dropout's outputs for whole inputs: each worker draws the whole mask, as one process does."""
        axis = (_region.get() or _Region()).axes.get(id(layer))
        if axis is None or not training:
            return call(inputs, training=training)
        shape = tf.unstack(tf.shape(inputs))
        shape[axis] *= self._group.size
        factors = call(tf.ones(tf.stack(shape), inputs.dtype), training=training)
        begin = self._group.rank * inputs.shape[axis]
        return inputs * tf.gather(factors, tf.range(begin, begin + inputs.shape[axis]), axis=axis)

    def _look_up(self, layer: Any, call: Function, inputs: tf.Tensor) -> tf.Tensor:
        """Returns the rows of an Embedding of which this worker holds some rows or some columns."""
        table = layer.embeddings
        if not laid_out.is_laid_out(table):
            return row_lookups.look_up(layer, call, inputs)
        if table.holder.axis is None or not isinstance(inputs, tf.Tensor) or not _is_in_step():
            return call(inputs)
        ids = row_lookups.row_numbers(layer, inputs)
        piece = keras_internals.raw_value(table)
        if table.holder.axis == 1:
            return tf.cast(self._group.whole(tf.gather(piece, ids), -1), layer.compute_dtype)
        is_own, position = self._group.own(ids, layer.input_dim // self._group.size)
        rows = tf.gather(piece, position)
        rows = tf.where(is_own[..., tf.newaxis], rows, tf.zeros_like(rows))
        return tf.cast(self._group.total(rows), layer.compute_dtype)

    def _attend(self, layer: Any, call: Function, query: tf.Tensor, value: tf.Tensor, **kwargs: Any) -> Structure:
        """Returns the outputs of an attention layer, of which each worker computes some heads."""
        projections, dropout, _ = keras_internals.attention_parts(layer)
        if not _is_in_step():
            return call(query, value, **kwargs)
        if not _has_split_heads(layer, query, kwargs):
            if any(map(_split_of, projections)) and self._group.rank == 0 and layer.path not in self._notified:
                self._notified.add(layer.path)
                logger.info(
                    f"{layer.path}: each worker computes all heads, because the layer's kernels are not all split by heads, or its call needs "
                    "all heads (scores, or a mask with a head's dimension)."
                )
            return call(query, value, **kwargs)
        entered: dict[int, tf.Tensor] = {}

        def enter(value: tf.Tensor) -> tf.Tensor:
            # Gradients are summed once for a tensor that is query and value.
            if id(value) not in entered:
                entered[id(value)] = keras_internals.copy_mask(value, self._group.shared(value))
            return entered[id(value)]

        if kwargs.get("key") is not None:
            kwargs["key"] = enter(kwargs["key"])
        axes = dict.fromkeys(map(id, projections), -2)
        axes[id(dropout)] = -3
        with _within(_Region(axes, is_entered=True)):
            return call(enter(query), enter(value), **kwargs)


class _Split(NamedTuple):
    """The split of the kernel of a layer.

    Attributes:
        by_columns: Whether parts of the outputs are computed, and not parts of the inputs read.
        axis: The axis of the parts in the outputs, or in the inputs; counted from the last one.
        size: The size of the whole dimension.
    """

    by_columns: bool
    axis: int
    size: int


def _split_of(layer: Any) -> _Split | None:
    """Returns how the kernel of a Dense or EinsumDense layer is split; None for others, and if its computation cannot be split."""
    if type(layer) not in _PROJECTIONS or layer.quantization_mode is not None:
        return None
    kernel = layer.kernel  # with LoRA, a tensor
    if not laid_out.is_laid_out(kernel) or kernel.holder.axis is None:
        return None
    axis = kernel.holder.axis
    equation = getattr(layer, "equation", "...x,xy->...y")
    inputs, weights, outputs = equation.replace("->", ",").replace(" ", "").split(",")
    letter = weights[axis]
    by_columns = letter in outputs
    side = outputs if by_columns else inputs
    if (by_columns and letter in inputs) or side.endswith("..."):
        return None
    return _Split(by_columns, side.index(letter) - len(side), kernel.shape[axis])


def _is_in_step() -> bool:
    """Returns whether layers run where the workers of a group run the same exchanges: in a step, not in a branch, a loop or a tf.function of it."""
    step = step_context.current()
    if step is None or step.is_compiled or keras_internals.in_symbolic_scope():
        return False
    return tf.executing_eagerly() if step.graph is None else tf.compat.v1.get_default_graph() is step.graph


@contextlib.contextmanager
def _within(region: _Region) -> Iterator[None]:
    token = _region.set(region)
    try:
        yield
    finally:
        _region.reset(token)


def _has_split_heads(layer: Any, query: tf.Tensor, arguments: dict[str, Any]) -> bool:
    """Returns whether all projections of an attention layer are split by heads, and its call needs no whole heads."""
    projections, _, output = keras_internals.attention_parts(layer)
    for projection in (*projections, output):
        split = _split_of(projection)
        if split is None or split.axis != -2 or split.by_columns == (projection is output):
            return False
    mask = arguments.get("attention_mask")
    if mask is not None and len(mask.shape) > 3:
        return False
    return len(query.shape) == 3 and not arguments.get("return_attention_scores")


def _pairs(model: keras.Model, takes_parts: bool) -> tuple[dict[int, int], bool]:
    """Returns the layers in a model's graph whose outputs can stay parts, and whether the model's output stays one, which `takes_parts` allows.

    The layers are a dictionary of the axis of the parts by the layer's id. They are layers by columns, and elementwise ones after them, if all that read their outputs are such elementwise layers or layers by rows.
    """
    calls = keras_internals.graph_calls(model)
    producers = {id(tensor): id(layer) for layer, _, outputs in calls for tensor in outputs}
    axes: dict[int, int] = {}

    def input_axes(inputs: list[Any]) -> set[int | None]:
        return {axes.get(producers[id(tensor)]) for tensor in inputs}

    for layer, inputs, _ in calls:
        split = _split_of(layer)
        if split is not None and split.by_columns and _keeps_parts(layer):
            axes[id(layer)] = split.axis
        if type(layer) in _BETWEEN and _keeps_parts(layer):
            axis = input_axes(inputs).pop()
            if axis is not None:
                axes[id(layer)] = axis
    last = [producers[id(tensor)] for tensor in model.outputs]
    must_be_whole = {layer for layer in last if not takes_parts or axes.get(layer) != -1}
    # A layer whose outputs must be whole may make further layers whole.
    while True:
        for layer, inputs, _ in calls:
            reads = _axis_read(layer, axes)
            if input_axes(inputs) != {reads}:
                must_be_whole |= {producers[id(tensor)] for tensor in inputs}
                if type(layer) in _BETWEEN:
                    must_be_whole.add(id(layer))
        must_be_whole &= axes.keys()
        if not must_be_whole:
            return axes, last[0] in axes
        for each in must_be_whole:
            del axes[each]


def _axis_read(layer: Any, axes: dict[int, int]) -> int | None:
    """Returns the axis of the parts that a layer reads; None if it reads whole values."""
    if type(layer) in _BETWEEN:
        return axes.get(id(layer))
    split = _split_of(layer)
    if split is None or split.by_columns:
        return None
    return split.axis


def _keeps_parts(layer: Any) -> bool:
    """Returns whether the activation function of a layer, if it has one, computes each element from one element, and nothing reads the whole output."""
    activation = getattr(layer, "activation", None)
    return (activation is None or activation in _ELEMENTWISE) and layer.activity_regularizer is None
