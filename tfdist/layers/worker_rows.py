"""Lookups in a table whose rows the workers hold, row `id` on worker `id % workers`: ids travel to the rows' workers, and rows back.

In the backward pass each gradient of a row travels to its worker, which receives those of all replicas in the order of the replicas. So the
sum has the bits of a table that every worker holds. The copies of a worker's variable, one for each of its replicas, have equal gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.collectives import own_time
from tfdist.collectives.communicator import DeviceCommunicator, communicator_for
from tfdist.compat import keras_internals
from tfdist.compat.tf_internals import regroup
from tfdist.config import relations
from tfdist.errors import ConfigError
from tfdist.replicas import step_context
from tfdist.replicas.step_context import StepContext


class _Plan(NamedTuple):
    """The counts of rows that replicas ask of each worker; equal on all replicas of a worker.

    Attributes:
        asked: The rows of this worker's variable that workers ask for, one worker after the other.
        askers: The number of them for each worker.
        order: The places of this worker's ids, those of all its replicas, when they are sorted by the rows' workers.
        counts: The number of ids for each worker.
        width: The most ids that a worker sends to another one, and at least 1.
        step: The number of the step in its execution.
    """

    asked: tf.Tensor
    askers: tf.Tensor
    order: tf.Tensor
    counts: tf.Tensor
    width: tf.Tensor
    step: tf.Tensor


def look_up(layer: str, variable: tf.Variable, ids: tf.Tensor, workers: int) -> tf.Tensor:
    """Returns the rows of a vector of ids. A collective, within a replica's step.

    Args:
        layer: The name of the layer, for messages.
        variable: This replica's copy of the rows that its worker holds.
        ids: Numbers of rows of the whole table.
        workers: The number of workers.
    """
    step = step_context.current()
    if keras_internals.in_symbolic_scope() or (step is not None and step.is_alone):  # traced, and not run
        return tf.gather(variable, ids // workers)
    if step is not None and step.is_compiled:
        relations.check({"worker_table": f"{layer} with rows on the workers", "jit_compile": ""})
    why = _fault(step)
    if why:
        raise ConfigError(
            f"{layer} cannot look up ids, whose rows the workers hold: {why}, or give the layer shards=1."
        )
    assert step is not None  # noqa: S101 (for the type checker)
    if isinstance(communicator_for(tf.distribute.get_strategy()), DeviceCommunicator):
        relations.check({"worker_table": f"{layer} with rows on the workers", "gpus_of_workers": ""})
    unique, places = tf.unique(ids)
    context = tf.distribute.get_replica_context()
    plan = _Plan(*context.merge_call(_ask, args=(unique, tf.cast(step.number, tf.int64))))
    rows = _exchanged(tf.gather(variable, plan.asked), plan, tf.size(unique))
    context.strategy.decorrelate_random_numbers()  # this replica has waited for the others
    return _weighted(tf.gather(rows, places), step)


def _fault(step: StepContext | None) -> str:
    """Returns why replicas cannot exchange rows here, and a remedy; empty if they can."""
    context = tf.distribute.get_replica_context()
    if context is None or step is None:
        return "the model is called outside of a step, perhaps on one worker alone; use fit, evaluate or predict"
    strategy = context.strategy
    if tf.executing_eagerly():
        if len(strategy.extended.worker_devices) > 1:
            return "with run_eagerly=True the devices of a worker would wait for each other; use run_eagerly=False"
    elif tf.compat.v1.get_default_graph() is not step.graph:
        return "the call is within tf.cond, tf.while_loop or a tf.function, where workers cannot wait for each other; call the layer before"
    return ""


def _ask(strategy: tf.distribute.Strategy, unique: Structure, step: Structure) -> Structure:
    """Sends each id to the worker of its row. Returns a plan for each replica. In cross-replica context."""
    group = communicator_for(strategy)
    workers = group.processes
    step = strategy.experimental_local_results(step)[0]
    ids = tf.concat(strategy.experimental_local_results(unique), 0)
    owners = tf.cast(ids % workers, tf.int32)
    order = tf.argsort(owners, stable=True)
    counts = tf.math.bincount(owners, minlength=workers, maxlength=workers)
    # The communicator gathers a row of each replica; the first one of a worker has its numbers.
    sent = [counts[tf.newaxis], *[tf.zeros([1, workers], tf.int32)] * (len(group.ranks) - 1)]
    gathered = own_time.leave_out_wait(strategy, counts, lambda: group.gather(sent, step))[0]
    pairs = tf.reduce_sum(tf.reshape(gathered, [workers, -1, workers]), 1)  # [from, to]
    askers = pairs[:, group.ranks[0] // len(group.ranks)]
    width = tf.maximum(1, tf.reduce_max(pairs))
    received = group.exchange(_pack(tf.gather(ids, order), counts, width), step)
    plan = _Plan(_unpack(received, askers) // workers, askers, order, counts, width, step)
    return regroup(tuple(plan for _ in group.ranks))


def _exchanged(asked: tf.Tensor, plan: _Plan, size: tf.Tensor) -> tf.Tensor:
    """Returns the rows of this replica's ids, of which there are `size`; `asked` are the rows that workers ask this one for."""
    merge_call = tf.distribute.get_replica_context().merge_call

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        returned = merge_call(_return, args=(tf.convert_to_tensor(upstream), plan))
        tf.distribute.get_strategy().decorrelate_random_numbers()
        return tf.ensure_shape(returned, asked.shape)

    @tf.custom_gradient
    def exchange(asked: tf.Tensor) -> Structure:
        return merge_call(_answer, args=(asked, size, plan)), gradient

    return exchange(asked)


def _weighted(rows: tf.Tensor, step: StepContext) -> tf.Tensor:
    """Returns rows unchanged; multiplies their gradient by this replica's share of the batch, as the optimizer multiplies other gradients."""
    weight = step.gradient_weight
    if step.weighs_loss and isinstance(weight, tf.Tensor):
        weight = weight > 0  # the loss has the share; without examples its mean is NaN

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(upstream, tf.cast(weight, upstream.dtype))

    @tf.custom_gradient
    def identity(rows: tf.Tensor) -> Structure:
        return tf.identity(rows), gradient

    if weight is None or (step.weighs_loss and isinstance(weight, float)):
        return rows
    return identity(rows)


def _answer(strategy: tf.distribute.Strategy, asked: Structure, sizes: Structure, plans: Structure) -> Structure:
    """Sends rows to the workers that have asked for them. Returns the rows of each replica. In cross-replica context."""
    local = strategy.experimental_local_results
    plan = _local_plan(strategy, plans)
    group = communicator_for(strategy)
    received = group.exchange(_pack(local(asked)[0], plan.askers, plan.width), plan.step)
    rows = tf.gather(_unpack(received, plan.counts), tf.math.invert_permutation(plan.order))
    if len(group.ranks) == 1:
        return rows
    return regroup(tuple(tf.split(rows, tf.stack(local(sizes)), num=len(group.ranks))))


def _return(strategy: tf.distribute.Strategy, upstream: Structure, plans: Structure) -> Structure:
    """Sends gradients of rows to the rows' workers: the inverse of `_answer`. Each replica of a worker receives all. In cross-replica context."""
    plan = _local_plan(strategy, plans)
    group = communicator_for(strategy)
    grads = tf.concat(strategy.experimental_local_results(upstream), 0)
    received = group.exchange(_pack(tf.gather(grads, plan.order), plan.counts, plan.width), plan.step)
    returned = _unpack(received, plan.askers)
    return regroup(tuple(returned for _ in group.ranks))


def _local_plan(strategy: tf.distribute.Strategy, plans: Structure) -> _Plan:
    return _Plan(*(strategy.experimental_local_results(value)[0] for value in plans))


def _pack(rows: tf.Tensor, counts: tf.Tensor, width: tf.Tensor) -> tf.Tensor:
    """Returns rows, of which `counts` are for each worker, padded to `[workers, width, ...]`."""
    places = tf.where(tf.sequence_mask(counts, width))
    shape = tf.concat([[tf.size(counts), width], tf.shape(rows)[1:]], 0)
    packed = tf.scatter_nd(places, rows, tf.cast(shape, places.dtype))
    return tf.ensure_shape(packed, [counts.shape[0], None, *rows.shape[1:]])


def _unpack(packed: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Returns the rows without padding: the inverse of `_pack`."""
    return tf.boolean_mask(packed, tf.sequence_mask(counts, tf.shape(packed)[1]))
