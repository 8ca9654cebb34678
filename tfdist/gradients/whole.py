"""Facts about whole gradients, to which all ranks contribute that hold parts of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.aliases import Gradient, Structure, Variables
from tfdist.collectives.communicator import communicator_for
from tfdist.compat import laid_out
from tfdist.compat.tf_internals import regroup
from tfdist.gradients import gradient_lists, worker_tables
from tfdist.gradients.way import Batch, Rest, Stage
from tfdist.layers.table import is_own
from tfdist.strategy import as_ours


class FindFinite(Stage):
    """Finds out whether the gradients of all ranks are finite.

    Args:
        differ: Whether each replica has gradients of its own.
    """

    def __init__(self, differ: bool):
        self._differ = differ

    def __call__(self, batch: Batch, rest: Rest) -> None:
        grads, variables = batch.grads, batch.variables
        if batch.finite is None:
            finite = all_finite(grads, variables, self._differ)
        elif own := worker_tables.own_indices(grads, variables):
            rows = all_finite([grads[index] for index in own], [variables[index] for index in own], self._differ)
            finite = batch.finite & rows
        else:
            finite = batch.finite
        rest(dataclasses.replace(batch, finite=finite))


def all_finite(grads: Sequence[Gradient], variables: Variables, differ: bool) -> tf.Tensor:
    """Returns whether the gradients of all ranks are finite, the same on all of them. Within a replica; a collective if values differ.

    Args:
        grads: The gradients.
        variables: Their variables.
        differ: Whether each replica has values of its own; else all have the same ones, but for their rows and pieces.
    """
    zero_or_nan = gradient_lists.nan_unless_finite(grads)
    ours = as_ours(tf.distribute.get_strategy())
    if ours and ours.trains_alone:
        return tf.math.is_finite(zero_or_nan)
    if differ or any(map(is_own, variables)):
        (zero_or_nan,) = gradient_lists.all_reduce(tf.distribute.ReduceOp.SUM, [zero_or_nan])
    return tf.math.is_finite(ours.sum_over_pieces(zero_or_nan) if ours else zero_or_nan)


def norms_squared(grads: Sequence[Gradient], variables: Variables) -> list[tf.Tensor]:
    """Returns the square of the norm of each whole gradient; of a table's variables that of the variable. Within a replica."""
    squares = []
    for grad in grads:
        values = grad.values if isinstance(grad, tf.IndexedSlices) else grad
        squares.append(tf.reduce_sum(tf.square(tf.cast(values, tf.float32))))
    rows = [index for index, variable in enumerate(variables) if is_own(variable)]
    if rows:
        context = tf.distribute.get_replica_context()
        total = context.merge_call(_sum_over_workers, args=(tf.stack([squares[index] for index in rows]),))
        for index, square in zip(rows, tf.unstack(total, len(rows)), strict=True):
            squares[index] = square
    pieces = {index: copies for index, each in enumerate(variables) if (copies := laid_out.copies(each))}
    if pieces:
        # A piece that several workers hold counts once.
        own = tf.stack([squares[index] / copies for index, copies in pieces.items()])
        ours = as_ours(tf.distribute.get_strategy())
        assert ours is not None  # noqa: S101 (for the type checker: only strategies of tfdist have pieces)
        for index, square in zip(pieces, tf.unstack(ours.sum_over_pieces(own), len(pieces)), strict=True):
            squares[index] = square
    return squares


def _sum_over_workers(strategy: tf.distribute.Strategy, squares: Structure) -> Structure:
    """Returns the sums over the workers, in the order of `tree`. In cross-replica context."""
    group = communicator_for(strategy)
    own, *copies = strategy.experimental_local_results(squares)
    # The replicas of a worker have the same rows.
    totals = group.all_reduce([[own], *([tf.zeros_like(copy)] for copy in copies)])
    return regroup(tuple(total for (total,) in totals))
