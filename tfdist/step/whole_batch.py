"""Gives every replica the whole batch of a loss or metric, so that one of any kind is what one process computes.

Of a loss each replica gathers the labels, predictions and weights of all, and puts its own predictions in their place. The gradient of the loss
flows through these alone, so that the replicas' gradients add up to that of one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.communicator import InProcessCommunicator, communicator_for
from tfdist.compat import keras_losses
from tfdist.compat.tf_internals import num_replicas, regroup
from tfdist.config.strategy_traits import traits_of
from tfdist.errors import ConfigError
from tfdist.replicas.step_context import StepContext
from tfdist.step.totals import divide_by_share

# Found in the message of the error with which a step ends.
ROWS_ARE_NOT_EXAMPLES = (
    "A loss that returns one number for a batch is given the whole batch of all replicas, and so is such a metric, or one of a class of "
    "your own. Each row of its y_true, y_pred and sample_weight must be an example; some have more or fewer rows. Give the output a row "
    "for each example, such as [batch, 2, size] in place of [2 * batch, size], return one value for each example, or, if the class "
    "of a metric counts each row by itself, set `sums_examples = True` in it."
)


def obstacle(step: StepContext, dtype: Any, arguments: Sequence[Any], limit: int) -> str | None:
    """Returns why a loss or metric cannot be given the whole batch; None if it can.

    Args:
        step: The context of this replica's step.
        dtype: The type in which it computes.
        arguments: Its `y_true`, `y_pred` and `sample_weight`, or what else it is given.
        limit: The most bytes of one example that may be sent.
    """
    strategy = tf.distribute.get_strategy()
    if not traits_of(strategy).gathers:
        return f"strategy {strategy.kind} gathers nothing amid a step"
    if tf.executing_eagerly() and num_replicas(strategy) > (local := len(strategy.extended.worker_devices)) > 1:
        return f"with run_eagerly=True {local} devices of a worker would wait for each other; use run_eagerly=False"
    if step.is_compiled:
        return "XLA, which jit_compile=True asks for, compiles no collectives; compile the model with jit_compile=False"
    given = [each for each in tf.nest.flatten(arguments, expand_composites=False) if each is not None]
    if step.rows is None or any(not isinstance(each, tf.Tensor) or not each.shape.rank for each in given):
        return "what it compares are no dense tensors with a row for each example"
    if any(each.dtype == tf.string for each in given):
        return "replicas do not gather strings"
    shapes = [each.shape[1:] for each in given]
    if step.place is None and not all(shape.is_fully_defined() for shape in shapes):
        return "the replicas' batches, each from a dataset of its own, may have different shapes; pad them to a fixed shape"
    size = tf.as_dtype(dtype).size * sum(math.prod(each or 1 for each in shape) for shape in shapes)
    if size > limit:
        return f"{size:,} bytes of an example are more than strategy.gather_loss_bytes ({limit:,}); raise it"
    return None


def gathered(step: StepContext, loss: keras.losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any) -> list[Any]:
    """Returns `y_true`, `y_pred` and `sample_weight` of the whole batch, in its order. A collective.

    Args:
        step: The context of this replica's step.
        loss: The loss that they are for: they get its type, as it would convert them itself.
        y_true: This replica's labels.
        y_pred: Its predictions, perhaps with a mask of Keras'; those of the result have it, too.
        sample_weight: Its weights, or None.
    """
    masks = [keras_losses.mask(each) for each in tf.nest.flatten(y_pred)]
    own = [[y_true, y_pred, sample_weight], [None if mask is None else tf.cast(mask, loss.dtype) for mask in masks]]
    own = tf.nest.map_structure(lambda v: None if v is None else keras.ops.convert_to_tensor(v, loss.dtype), own)
    columns, before = _gather_columns(step, [each for each in tf.nest.flatten(own) if each is not None])
    mine, whole = tf.cast(step.examples, tf.int32), iter(columns)
    given, found_masks = tf.nest.map_structure(lambda each: None if each is None else next(whole), own)

    def with_own(others: Any, mine_alone: Any, mask: Any) -> Any:
        joined = tf.concat([others[:before], mine_alone[:mine], others[before + mine :]], 0)
        if mask is not None:
            keras_losses.set_mask(joined, tf.cast(mask, tf.bool))
        return joined

    own_pred = tf.nest.flatten(own[0][1])
    joined = [with_own(*each) for each in zip(tf.nest.flatten(given[1]), own_pred, found_masks, strict=True)]
    return [given[0], tf.nest.pack_sequence_as(given[1], joined), given[2]]


def gathered_values(step: StepContext, values: Any) -> Any:
    """Returns what a metric is given, of the whole batch, in its order and its types; gradients do not flow through it. A collective.

    Args:
        step: The context of this replica's step.
        values: Tensors with a row for each example, perhaps with masks of Keras', in any structure; other values stay as they are.
    """
    tensors = [each for each in tf.nest.flatten(values) if tf.is_tensor(each)]
    masks = [mask for each in tensors if (mask := keras_losses.mask(each)) is not None]
    sent = [*tensors, *masks]
    # float32 holds the integers of up to 16 bits.
    wide = tf.float64 if any(each.dtype.size > 2 and each.dtype != tf.float32 for each in sent) else tf.float32
    columns, _ = _gather_columns(step, [tf.cast(each, wide) for each in sent])
    whole = [tf.cast(column, each.dtype) for column, each in zip(columns, sent, strict=True)]
    found, found_masks = iter(whole), iter(whole[len(tensors) :])

    def of_whole_batch(value: Any) -> Any:
        if not tf.is_tensor(value):
            return value
        joined = next(found)
        if keras_losses.mask(value) is not None:
            keras_losses.set_mask(joined, next(found_masks))
        return joined

    return tf.nest.map_structure(of_whole_batch, values)


def divide_gradient(value: tf.Tensor, part: Any) -> tf.Tensor:
    """Returns a loss of the whole batch as it is, whose gradient is divided by this replica's share, which it will be multiplied by."""

    @tf.custom_gradient
    def identity(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: divide_by_share(upstream, part)

    return identity(value)


def _gather_columns(step: StepContext, sent: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns tensors of the whole batch, and how many of its examples come before this replica's. A collective.

    Args:
        step: The context of this replica's step.
        sent: Of one type, with a row for each example.
    """
    with tf.control_dependencies([_check_rows(each, step.rows) for each in sent]):
        flat = [tf.reshape(each, [step.rows, -1]) for each in sent]
    mine = tf.cast(step.examples, tf.int32)
    all_rows, before = _all_gather(tf.stop_gradient(tf.concat(flat, 1))[:mine], step)
    columns = tf.split(all_rows, [tf.shape(each)[1] for each in flat], axis=1, num=len(flat))
    whole = [
        tf.ensure_shape(tf.reshape(column, tf.concat([[-1], tf.shape(each)[1:]], 0)), [None, *each.shape[1:]])
        for column, each in zip(columns, sent, strict=True)
    ]
    return whole, before


def _all_gather(rows: tf.Tensor, step: StepContext) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows of all replicas in their order, and how many come before this one's.

    Args:
        rows: Of this replica, `[examples, numbers]`.
        step: The context of this replica's step.
    """
    context, mine = tf.distribute.get_replica_context(), tf.shape(rows)[0]
    number, replicas = tf.cast(step.number, tf.int64), num_replicas(context.strategy)

    def gather(strategy: tf.distribute.Strategy, values: Any, step: Any) -> Any:
        group = communicator_for(strategy) if strategy.traits.several_processes else InProcessCommunicator(replicas)
        local = strategy.experimental_local_results
        return regroup(tuple(group.gather(list(local(values)), local(step)[0])))

    if step.place is None:
        counts = context.merge_call(gather, args=(mine[tf.newaxis], number))
        before, most = tf.reduce_sum(counts[: context.replica_id_in_sync_group]), tf.reduce_max(counts)
    else:
        before, size = (tf.cast(each, tf.int32) for each in step.place())
        most = (size + replicas - 1) // replicas
    wire = tf.float64 if rows.dtype == tf.float64 else tf.float32  # which every collective takes
    places = tf.cast(before + tf.range(mine), wire)[:, tf.newaxis]
    sent = tf.pad(tf.concat([places, tf.cast(rows, wire)], 1), [[0, most - mine], [0, 0]], constant_values=-1)
    every = context.merge_call(gather, args=(sent, number))
    context.strategy.decorrelate_random_numbers()  # as it has waited for the other replicas
    every = tf.boolean_mask(every, every[:, 0] >= 0)
    return tf.cast(tf.gather(every[:, 1:], tf.argsort(every[:, 0])), rows.dtype), before


def _check_rows(tensor: tf.Tensor, rows: tf.Tensor | int) -> Any:
    """Returns an operation that fails if a tensor has other than so many rows. Raises ConfigError if that is known now."""
    known, wanted = tensor.shape[0], tf.get_static_value(rows)
    if known is not None and wanted is not None:
        if known != wanted:
            raise ConfigError(ROWS_ARE_NOT_EXAMPLES)
        return tf.no_op()
    return tf.debugging.Assert(tf.equal(tf.shape(tensor)[0], rows), [ROWS_ARE_NOT_EXAMPLES], summarize=1) or tf.no_op()
