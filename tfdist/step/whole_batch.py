"""The whole batch on every replica, so that values that depend on all examples equal those of one process.

`whole_batch` gathers a tensor for a layer or a step. Metrics receive the values of all replicas. For a loss each replica gathers all
labels, predictions and weights, and replaces its part of the gathered predictions by its local predictions. The gradient of the loss flows
only through the local predictions, so that the replicas' gradients add up to the gradient of one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.collectives import own_time
from tfdist.collectives.communicator import Communicator, InProcessCommunicator, communicator_for
from tfdist.compat import keras_internals, keras_losses
from tfdist.compat.tf_internals import num_replicas, regroup
from tfdist.config.strategy_traits import traits_of
from tfdist.errors import ConfigError, format_value
from tfdist.replicas import equal_weights, step_context
from tfdist.replicas.step_context import StepContext
from tfdist.step.totals import divide_by_share, sum_dtype
from tfdist.strategy import as_ours

# `Execution` searches the messages of failed steps for this text.
ROWS_ARE_NOT_EXAMPLES = (
    "A loss that returns one number for a batch, or compares its examples, is given the whole batch of all replicas, and so is such a "
    "metric, or one of a class of your own. Each row of its y_true, y_pred and sample_weight must be an example; some have more or fewer rows. Give the output a row "
    "for each example, such as [batch, 2, size] in place of [2 * batch, size], return one value for each example, or, if the class "
    "of a metric counts each row by itself, set `sums_examples = True` in it."
)
# `Execution` searches for this text, too.
GATHERED_ROWS_ARE_NOT_EXAMPLES = (
    "tfdist.whole_batch takes a tensor with a row for each example of this replica's part of the batch, and was given more or fewer rows. "
    "Give it each view of the examples by itself, before you concatenate them."
)


def whole_batch(tensor: tf.Tensor) -> Structure:
    """Returns a tensor's rows of all replicas, in the order of the batch, as in one process.

    Use it for values that depend on all examples of a batch, such as a queue of features, a codebook or a maximum that a layer assigns. All
    replicas then compute equal values. A collective with gradients: the gradient of this replica's rows is the sum of their gradients in all
    replicas' losses. With one replica, under parameter servers, and outside of replicas the tensor is returned unchanged.

    Args:
        tensor: `[examples, ...]` of numbers or bools: a row for each example of this replica's part of the batch.

    Returns:
        `[examples of all replicas, ...]`, without rows of replicas that have no example.

    Raises:
        ConfigError: It is called within a replica but outside of a step, within `tf.cond`, `tf.while_loop` or a `tf.function`, under
            `jit_compile=True`, or with a tensor that has no row for each example.

    Examples:
        `self.queue.assign(keras.ops.concatenate([tfdist.whole_batch(keys), self.queue])[:4096])`

    Examples:
        >>> import tensorflow as tf, tfdist
        >>> tfdist.whole_batch(tf.constant([1.0, 2.0])).numpy().tolist()  # outside of a step: all rows are here
        [1.0, 2.0]
    """
    step = step_context.current()
    if not (tf.is_tensor(tensor) or isinstance(tensor, keras.Variable)) or keras_internals.in_symbolic_scope():
        return tensor
    if step is None:
        if tf.distribute.in_cross_replica_context() or num_replicas(tf.distribute.get_strategy()) == 1:
            return tensor
        raise ConfigError(
            "tfdist.whole_batch is called by a replica outside of a step, where the replicas' parts of the batch are not known. Call it in "
            "a layer or a step that trainer.fit or trainer.step runs."
        )
    if step.is_alone:
        if num_replicas(tf.distribute.get_strategy()) == 1:
            return tensor
        return tf.identity(tensor, name=equal_weights.EQUAL_ON_REPLICAS)  # a step that is traced and not run
    return _whole_batch(keras.ops.convert_to_tensor(tensor), step)


def _whole_batch(tensor: tf.Tensor, step: StepContext) -> tf.Tensor:
    why = _gather_obstacle(step) or _rows_obstacle(tensor, step)
    if why is not None:
        raise ConfigError(f"tfdist.whole_batch cannot gather the rows of all replicas: {why}.")
    dtype = tensor.dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise ConfigError(f"tfdist.whole_batch takes numbers or bools. Received: a tensor of {dtype.name}.")
    if not tensor.shape.rank:
        raise ConfigError(
            f"tfdist.whole_batch takes a tensor with a row for each example. Received: shape {format_value(tensor.shape.as_list())}."
        )
    with tf.control_dependencies([_check_rows(tensor, step.rows, of_loss=False)]):
        sent = _to_floats(tf.stop_gradient(tensor))  # `_with_gradient` adds the gradient of all replicas' losses
    own_count = tf.cast(step.examples, tf.int32)
    rows, before = _all_gather(tf.reshape(sent, [step.rows, -1])[:own_count], step)
    shape = tf.concat([[-1], tf.shape(sent)[1:]], 0)
    whole_rows = tf.ensure_shape(_from_floats(tf.reshape(rows, shape), dtype), [None, *tensor.shape[1:]])
    if dtype.is_floating:
        whole_rows = _with_gradient(whole_rows, tensor, before, own_count, step)
    return tf.identity(whole_rows, name=equal_weights.EQUAL_ON_REPLICAS)


def _rows_obstacle(tensor: tf.Tensor, step: StepContext) -> str | None:
    """Returns why the rows of all replicas cannot be gathered at this point of the step; None if they can."""
    if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not step.graph:
        return "it is within tf.cond, tf.while_loop or a tf.function, where replicas cannot wait for each other; call it before"
    if step.rows is None or step.examples is None:
        return "the number of examples of this batch is not known"
    if step.position is None and not tensor.shape[1:].is_fully_defined():
        return "the replicas' batches, each from a dataset of its own, may have different shapes; pad them to a fixed shape"
    return None


def _to_floats(tensor: tf.Tensor) -> tf.Tensor:
    """Converts values to floating-point values, exactly, because collectives do not support all dtypes."""
    if tensor.dtype.is_floating:
        return tensor
    if tensor.dtype.size == 8:
        tensor = tf.bitcast(tensor, tf.int32)  # [..., 2]
    return tf.cast(tensor, tf.float64)


def _from_floats(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.is_integer and dtype.size == 8:
        return tf.bitcast(tf.cast(tensor, tf.int32), dtype)
    return tf.cast(tensor, dtype)


def _with_gradient(
    whole_rows: tf.Tensor, own: tf.Tensor, before: tf.Tensor, own_count: tf.Tensor, step: StepContext
) -> tf.Tensor:
    """Returns `whole_rows`, whose gradient reaches this replica's rows from the losses of all replicas.

    In a custom step a replica's gradient is multiplied by its share at the end. The parts that come from other replicas' losses must
    be multiplied by the other replicas' shares instead.
    """
    share = None if step.weighs_loss else step.gradient_weight
    wide = sum_dtype(whole_rows.dtype)

    def gradient(upstream: Structure) -> tuple[tf.Tensor, None]:
        sent = tf.math.multiply_no_nan(tf.cast(upstream, wide), tf.cast(own_count > 0, wide))
        if isinstance(share, tf.Tensor):
            sent *= tf.cast(share, wide)
        context = tf.distribute.get_replica_context()
        total = context.merge_call(add, args=(sent, tf.cast(step.number, tf.int64)))
        context.strategy.decorrelate_random_numbers()  # this replica has waited for the others
        if isinstance(share, tf.Tensor):
            total = tf.math.divide_no_nan(total, tf.cast(share, wide))
        rows = tf.shape(own)[0]  # 1 if there is no example
        padding = [[0, rows - own_count], *[[0, 0]] * (own.shape.rank - 1)]
        return tf.cast(tf.ensure_shape(tf.pad(total[before : before + own_count], padding), own.shape), own.dtype), None

    def add(strategy: tf.distribute.Strategy, values: Structure, step: tf.Tensor) -> Structure:
        local = strategy.experimental_local_results
        return regroup(tuple(_group(strategy).add(list(local(values)), local(step)[0])))

    @tf.custom_gradient
    def identity(own: tf.Tensor, whole_rows: tf.Tensor) -> Structure:
        return tf.identity(whole_rows), gradient

    return identity(own, whole_rows)


def _gather_obstacle(step: StepContext) -> str | None:
    """Returns why replicas cannot gather anything in a step; None if they can."""
    strategy = tf.distribute.get_strategy()
    if not traits_of(strategy).gathers:
        return f"strategy {strategy.config.name} gathers nothing during a step"
    local = len(strategy.extended.worker_devices)
    if tf.executing_eagerly() and num_replicas(strategy) > local > 1:
        return f"with run_eagerly=True {local} devices of a worker would wait for each other; use run_eagerly=False"
    if step.is_compiled:
        return "XLA, which jit_compile=True asks for, compiles no collectives; compile the model with jit_compile=False"
    return None


def obstacle(step: StepContext, dtype: tf.DType | str, arguments: Structure) -> str | None:
    """Returns why a loss or metric that computes in `dtype` cannot receive the whole batch of `arguments`; None if it can."""
    why = _gather_obstacle(step)
    if why is not None:
        return why
    tensors = [value for value in tf.nest.flatten(arguments, expand_composites=False) if value is not None]
    if step.rows is None or any(not isinstance(value, tf.Tensor) or not value.shape.rank for value in tensors):
        return "its arguments are not dense tensors with a row for each example"
    if any(tensor.dtype == tf.string for tensor in tensors):
        return "replicas do not gather strings"
    shapes = [tensor.shape[1:] for tensor in tensors]
    if step.position is None and not all(shape.is_fully_defined() for shape in shapes):
        return "the replicas' batches, each from a dataset of its own, may have different shapes; pad them to a fixed shape"
    size = tf.as_dtype(dtype).size * sum(math.prod(length or 1 for length in shape) for shape in shapes)
    ours = as_ours(tf.distribute.get_strategy())
    limit = ours.config.gather_loss_bytes if ours else 0
    if size > limit:
        return f"{size:,} bytes of an example are more than strategy.gather_loss_bytes ({limit:,}); raise it"
    return None


def gathered(
    step: StepContext, loss: keras.losses.Loss, y_true: Structure, y_pred: Structure, sample_weight: Structure
) -> list[Structure]:
    """Returns `y_true`, `y_pred` and `sample_weight` of the whole batch, in its order. A collective.

    All are cast to the loss's dtype, as the loss itself would do; predictions keep Keras' masks.
    """
    # Masks are sent as separate tensors, because collectives do not carry the mask attribute of a tensor. With one dtype for all
    # tensors, the loss's, one collective is enough.
    masks = [keras_losses.mask(tensor) for tensor in tf.nest.flatten(y_pred)]
    local = [[y_true, y_pred, sample_weight], masks]
    local = tf.nest.map_structure(lambda v: None if v is None else keras.ops.convert_to_tensor(v, loss.dtype), local)
    columns, before = _gather_columns(step, [tensor for tensor in tf.nest.flatten(local) if tensor is not None])
    local_count = tf.cast(step.examples, tf.int32)  # 0 without examples, where one row of the batch does not count
    gathered_columns = iter(columns)
    arguments, all_masks = tf.nest.map_structure(lambda v: None if v is None else next(gathered_columns), local)

    def with_local_rows(all_rows: Structure, local_rows: Structure, mask: Structure) -> Structure:
        # Gathered rows have no gradient. With its local predictions among them, each replica gets the gradient of the whole
        # batch's loss with respect to these only, so that the sum over the replicas is the gradient of one process.
        joined = tf.concat([all_rows[:before], local_rows[:local_count], all_rows[before + local_count :]], 0)
        if mask is not None:
            keras_losses.set_mask(joined, tf.cast(mask, tf.bool))
        return joined

    all_true, all_pred, all_weights = arguments
    local_pred = tf.nest.flatten(local[0][1])
    predictions = list(map(with_local_rows, tf.nest.flatten(all_pred), local_pred, all_masks))
    return [all_true, tf.nest.pack_sequence_as(all_pred, predictions), all_weights]


def gathered_values(step: StepContext, values: Structure) -> Structure:
    """Returns a metric's arguments for the whole batch, in batch order and with their dtypes, without gradients. A collective.

    `values` is a structure of tensors with a row for each example, which may have Keras' masks; other values are returned unchanged.
    """
    tensors = [tensor for tensor in tf.nest.flatten(values) if tf.is_tensor(tensor)]
    masks = [keras_losses.mask(tensor) for tensor in tensors]
    sent = [*tensors, *(mask for mask in masks if mask is not None)]
    # float32 holds the integers of up to 16 bits.
    fits = all(tensor.dtype.size <= 2 or tensor.dtype == tf.float32 for tensor in sent)
    wide = tf.float32 if fits else tf.float64
    columns, _ = _gather_columns(step, [tf.cast(tensor, wide) for tensor in sent])
    whole_rows = [tf.cast(column, tensor.dtype) for column, tensor in zip(columns, sent, strict=True)]
    all_tensors = iter(whole_rows)
    all_masks = iter(whole_rows[len(tensors) :])

    def of_whole_batch(value: Structure) -> Structure:
        if not tf.is_tensor(value):
            return value
        joined = next(all_tensors)
        if keras_losses.mask(value) is not None:
            keras_losses.set_mask(joined, next(all_masks))
        return joined

    return tf.nest.map_structure(of_whole_batch, values)


def divide_gradient(value: tf.Tensor, part: Structure) -> tf.Tensor:
    """Returns a loss of the whole batch unchanged; divides its gradient by this replica's share, which will multiply the gradient later."""

    @tf.custom_gradient
    def identity(x: tf.Tensor) -> Structure:
        return tf.identity(x), lambda upstream: divide_by_share(upstream, part)

    return identity(value)


def _gather_columns(step: StepContext, sent: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns tensors of the whole batch, and the number of examples before this replica's examples. A collective.

    The tensors in `sent` have one dtype and a row for each example.
    """
    with tf.control_dependencies([_check_rows(tensor, step.rows) for tensor in sent]):
        flat = [tf.reshape(tensor, [step.rows, -1]) for tensor in sent]
    own_count = tf.cast(step.examples, tf.int32)
    all_rows, before = _all_gather(tf.stop_gradient(tf.concat(flat, 1))[:own_count], step)
    columns = tf.split(all_rows, [tf.shape(tensor)[1] for tensor in flat], axis=1, num=len(flat))
    whole_rows = []
    for column, tensor in zip(columns, sent, strict=True):
        rows = tf.reshape(column, tf.concat([[-1], tf.shape(tensor)[1:]], 0))
        whole_rows.append(tf.ensure_shape(rows, [None, *tensor.shape[1:]]))
    return whole_rows, before


def _all_gather(rows: tf.Tensor, step: StepContext) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows of all replicas, `[examples, columns]`, in batch order, and the number of rows before this replica's rows."""
    context = tf.distribute.get_replica_context()
    own_count = tf.shape(rows)[0]
    number = tf.cast(step.number, tf.int64)

    def gather(strategy: tf.distribute.Strategy, values: Structure, step: tf.Tensor) -> Structure:
        local = strategy.experimental_local_results
        gathered = own_time.leave_out_wait(
            strategy, values, lambda: _group(strategy).gather(list(local(values)), local(step)[0])
        )
        return regroup(tuple(gathered))

    if step.position is None:
        counts = context.merge_call(gather, args=(own_count[tf.newaxis], number))
        before = tf.reduce_sum(counts[: context.replica_id_in_sync_group])
        most = tf.reduce_max(counts)
    else:
        replicas = num_replicas(context.strategy)
        before, size = (tf.cast(index, tf.int32) for index in step.position())
        most = (size + replicas - 1) // replicas
    # The first column is a row's index in the batch, because the order of the replicas' parts may differ from that of the batch. All
    # replicas send equally many rows; padding has the index -1.
    wire = sum_dtype(rows.dtype)
    indices = tf.cast(before + tf.range(own_count), wire)[:, tf.newaxis]
    sent = tf.concat([indices, tf.cast(rows, wire)], 1)
    sent = tf.pad(sent, [[0, most - own_count], [0, 0]], constant_values=-1)
    every = context.merge_call(gather, args=(sent, number))
    context.strategy.decorrelate_random_numbers()  # this replica has waited for the others
    every = tf.boolean_mask(every, every[:, 0] >= 0)
    return tf.cast(tf.gather(every[:, 1:], tf.argsort(every[:, 0])), rows.dtype), before


def _group(strategy: tf.distribute.Strategy) -> Communicator:
    if traits_of(strategy).several_processes:
        return communicator_for(strategy)
    return InProcessCommunicator(num_replicas(strategy))


def _check_rows(tensor: tf.Tensor, rows: tf.Tensor | int, of_loss: bool = True) -> Structure:
    """Returns an operation that fails unless a tensor has `rows` rows. Raises ConfigError if the trace already knows that it does not."""
    known = tensor.shape[0]
    wanted = tf.get_static_value(rows)
    if known is None or wanted is None:
        message = ROWS_ARE_NOT_EXAMPLES if of_loss else GATHERED_ROWS_ARE_NOT_EXAMPLES
        return tf.debugging.Assert(tf.equal(tf.shape(tensor)[0], rows), [message], summarize=1)
    if known == wanted:
        return tf.no_op()
    if of_loss:
        raise ConfigError(ROWS_ARE_NOT_EXAMPLES)
    raise ConfigError(GATHERED_ROWS_ARE_NOT_EXAMPLES)
