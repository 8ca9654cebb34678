"""Losses and metrics that compare the examples of a batch: their value of an example depends on the other examples, too."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.aliases import Function, Structure
from tfdist.replicas import equal_weights, random_seeds
from tfdist.step.graph_copies import trace_apart

# The rows that differ in the second evaluation. Of two neighbors, and of two rows half a batch apart, often only one is among them. Their
# number is odd, so that a count of labels changes, too.
_CHANGED = np.array([False, True, True, False, True, False, False, False])
_UNKNOWN_LENGTH = 4
_ROUNDING = {tf.float16: 0.01, tf.bfloat16: 0.05}  # 0.001 for other dtypes
_MOST_NUMBERS = 2**24  # of one evaluation
_READING = ("Assert", "ReadVariableOp", "ResourceGather")  # stateful operations that change nothing


def compares_examples(function: Function, y_true: Structure, y_pred: Structure) -> bool:
    """Returns whether the values of some examples change if only other examples change.

    Evaluates `function` twice, apart from the step, on made-up examples, which are the same on all workers. Returns False if this
    decides nothing: the function rejects them, draws random numbers, assigns variables or calls `tfdist.whole_batch`.

    `function` returns values of `(y_true, y_pred)`, two structures of tensors, with a row for each example. Only their shapes and
    dtypes are used.
    """
    tensors = tf.nest.flatten((y_true, y_pred))
    if not all(isinstance(tensor, tf.Tensor) and tensor.shape.rank for tensor in tensors):
        return False
    if any(tensor.dtype == tf.string for tensor in tensors):
        return False
    if len({tensor.shape[0] for tensor in tensors} - {None}) > 1:
        return False
    shapes = [(len(_CHANGED), *(length or _UNKNOWN_LENGTH for length in tensor.shape[1:])) for tensor in tensors]
    if sum(int(np.prod(shape)) for shape in shapes) > _MOST_NUMBERS:
        return False
    specs = [tf.TensorSpec(shape, tensor.dtype) for shape, tensor in zip(shapes, tensors, strict=True)]
    # Labels of 0 and 1 and predictions between them suit most functions. The second evaluation mirrors some rows, within this range.
    generator = np.random.default_rng(0)
    num_labels = len(tf.nest.flatten(y_true))
    labels = [generator.integers(0, 2, shape) for shape in shapes[:num_labels]]
    predictions = [generator.uniform(0, 1, shape) for shape in shapes[num_labels:]]
    before = labels + predictions
    after = [rows.copy() for rows in before]
    for rows in after:
        rows[_CHANGED] = 1 - rows[_CHANGED]

    def pack(flat: list[Structure]) -> Structure:
        return tf.nest.pack_sequence_as((y_true, y_pred), flat)

    def evaluate(rows: list[np.ndarray]) -> tf.Tensor:
        return traced(*pack([tf.cast(values, spec.dtype) for values, spec in zip(rows, specs, strict=True)]))

    try:
        _, traced = trace_apart(function, pack(specs))
        if not _can_run_apart(traced.graph):
            return False
        return random_seeds.run_in_clean_thread(lambda: _differ(evaluate(before), evaluate(after)))
    except Exception:  # a step on real examples will raise the function's own errors
        return False


def _can_run_apart(graph: tf.Graph) -> bool:
    for op in graph.get_operations():
        has_effect = op.op_def.is_stateful and op.type not in _READING
        if has_effect or equal_weights.EQUAL_ON_REPLICAS in op.name:
            return False
    return True


def _differ(first: tf.Tensor, second: tf.Tensor) -> bool:
    """Returns whether the values of an unchanged example differ by more than rounding."""
    if not first.dtype.is_floating or first.shape != second.shape or first.shape[:1] != _CHANGED.shape:
        return False
    before, after = (tf.cast(values, tf.float64).numpy()[~_CHANGED] for values in (first, second))
    compared = np.isfinite(before) & np.isfinite(after)
    scale = np.abs(before[compared]).max(initial=1)
    return bool((np.abs(after - before)[compared] > _ROUNDING.get(first.dtype, 1e-3) * scale).any())
