"""Sums an optimizer's gradients over all replicas, as they are or through a compressor, whose state it keeps.

If any replica's gradient is not finite, no state changes: a NaN in an error-feedback residual would never go away.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.aliases import Gradient
from tfdist.collectives.communicator import Communicator, communicator_for
from tfdist.collectives.requests import RankContext
from tfdist.compat.tf_internals import num_replicas, regroup
from tfdist.compression.base import NONE, BucketedReduction, Compressor, RowCodec, StateSpec
from tfdist.config.strategy_traits import traits_of
from tfdist.gradients import gradient_lists
from tfdist.strategy import as_ours

_NOTES, _OTHERS = -1, -2  # lanes beside those of buckets


class Reduction(tf.Module):
    """The sums of gradients over all replicas, through a compressor, for an optimizer's variables in its order.

    Attributes:
        slots: The compressor's state of each variable, by its number.
        left_out: How many updates this process has left out, as a gradient was not finite.
    """

    def __init__(self, compressor: Compressor, variables: Sequence[keras.Variable]):
        super().__init__(name="compression")
        self._strategy = variables[0].value.distribute_strategy
        self._group = communicator_for(self._strategy)
        self._bucket_bytes = _bucket_bytes(self._strategy)
        self.compressor = compressor
        self._layout = BucketedReduction(compressor, [(v.path, tuple(v.shape)) for v in variables])
        self.slots = self._layout.slots
        self.left_out = self._state(StateSpec("left_out", (), True), 0, "compression")
        self.states = [
            [self._state(slot, number, variable.path) for slot in slots]
            for number, (slots, variable) in enumerate(zip(self._layout.slots, variables, strict=True))
        ]

    def _state(self, slot: StateSpec, number: int, path: str) -> tf.Variable:
        with self._strategy.scope(), tf.init_scope():
            return tf.Variable(
                slot.initial(slot.shape, number),
                trainable=False,
                name=f"{path}/{slot.name}",
                synchronization=tf.VariableSynchronization.AUTO if slot.shared else tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA if slot.shared else tf.VariableAggregation.SUM,
            )

    def __call__(
        self, grads: Sequence[Gradient], numbers: Sequence[int], step: tf.Tensor, scale: tf.Tensor | None = None
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Returns the gradients' sums, and whether all of them are finite. In cross-replica context.

        `grads` has a value per replica for each gradient, dense or `tf.IndexedSlices`; `numbers` says of which variable each is. `step` counts
        updates. Gradients are multiplied by `scale`, without which errors that are fed back are kept; None means 1.
        """
        local = self._strategy.experimental_local_results
        mine = [[local(grad)[place] for grad in grads] for place in range(len(self._group.ranks))]
        compressed = [place for place, grad in enumerate(mine[0]) if grad.dtype == tf.float32]
        # Residuals of error feedback outlive a change of the loss scale, so they are kept for unscaled gradients. Gradients that are
        # not compressed have no residual and stay scaled: unscaled ones of 16 bits might underflow to 0.
        if scale is not None:
            mine = [_times(values, compressed, 1 / scale) for values in mine]
        sparse = [place for place, grad in enumerate(mine[0]) if isinstance(grad, tf.IndexedSlices)]
        dense = [place for place in compressed if place not in sparse]
        other = [place for place in range(len(grads)) if place not in (*dense, *sparse)]
        owners = [numbers[place] for place in dense]

        members = self._group.contexts(tf.cast(step, tf.int64))
        states = [
            [tuple(local(s)[place].read_value() for s in self.states[number]) for number in owners]
            for place in range(len(mine))
        ]
        packed = self._layout.run(
            self._group, [[values[p] for p in dense] for values in mine], states, members, owners, self._bucket_bytes
        )
        # The finiteness flag depends on every gradient, so it uses its own lane; where collectives are totally ordered (NCCL) it is
        # issued last. Otherwise the buckets would wait for the last gradient, instead of travelling while others are computed.
        others = self._all_reduce_uncompressed([[values[p] for p in other] for values in mine], members, _OTHERS)
        notes = self._all_reduce_uncompressed(
            [[gradient_lists.nan_unless_finite(values)] for values in mine], members, _NOTES
        )
        reduced: list[list[Gradient]] = [[None] * len(grads) for _ in mine]
        for into, of_dense, of_others in zip(reduced, packed, others, strict=True):
            for p, total in zip((*dense, *other), (*of_dense.sums, *of_others), strict=True):
                into[p] = total
        for p in sparse:
            rows = self._layout.compressors[numbers[p]].row_codec if p in compressed else NONE.row_codec
            for place, total in enumerate(
                gather_deduplicated_rows(self._group, [values[p] for values in mine], rows, members[0].step)
            ):
                reduced[place][p] = total
        if scale is not None:
            reduced = [_times(values, compressed, scale) for values in reduced]
        # The local gradients of all ranks must be finite, as a compressor may turn a NaN into a number. So must the sum, which may
        # overflow. Both are the same on all ranks, so all of them take the same branch below.
        finite = tf.math.is_finite(notes[0][0] + gradient_lists.nan_unless_finite(reduced[0]))

        def keep() -> tf.Tensor:
            for place, found in enumerate(packed):
                for number, new_states in zip(owners, found.states, strict=True):
                    for variable, state in zip(self.states[number], new_states, strict=True):
                        local(variable)[place].assign(state)
            return tf.constant(True)

        def leave_out() -> tf.Tensor:
            for place in range(len(mine)):
                local(self.left_out)[place].assign_add(1)
            return tf.constant(False)

        tf.cond(finite, keep, leave_out)
        if scale is not None:
            # Compression may have turned a NaN into a number. Restore it: `LossScaleOptimizer` looks for it to lower its scale.
            reduced = [gradient_lists.scale(values, tf.where(finite, 1.0, float("nan"))) for values in reduced]
        return [regroup(each) for each in zip(*reduced, strict=True)], finite

    def _all_reduce_uncompressed(
        self, values: Sequence[list[Gradient]], members: Sequence[RankContext], lane: int
    ) -> list[list[Gradient]]:
        """Returns the sums of some values for each of this process's ranks."""
        if not values[0]:
            return [[] for _ in values]
        exchanges = [
            NONE.exchange(each, [()] * len(each), member) for each, member in zip(values, members, strict=True)
        ]
        return [reduced.sums for reduced in self._group.run(exchanges, lane)]

    def seconds(self, repeats: int = 3) -> tuple[float, float]:
        """Returns the median times of `repeats` sums of gradients through the compressor, and without. A collective."""

        def timed(layout: BucketedReduction) -> float:
            @functools.partial(tf.function, autograph=False)
            def exchange() -> tf.Tensor:
                members = self._group.contexts(tf.constant(2**40, tf.int64))  # when warming up is long over
                values = [tf.random.stateless_normal(shape, [1, 2]) for shape in layout.shapes]
                states = [tuple(tf.zeros(slot.shape) for slot in slots) for slots in layout.slots]
                results = layout.run(
                    self._group,
                    [values] * len(members),
                    [states] * len(members),
                    members,
                    bucket_bytes=self._bucket_bytes,
                )
                return tf.add_n([tf.reduce_sum(total) for total in results[0].sums])

            exchange()
            found = []
            for _ in range(repeats):
                began = time.perf_counter()
                exchange().numpy()  # which waits for it
                found.append(time.perf_counter() - began)
            return statistics.median(found)

        return timed(self._layout), timed(BucketedReduction(NONE, [("", shape) for shape in self._layout.shapes]))


def uses_bucketed_all_reduce(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether `bucketed_all_reduce` is for this strategy; TensorFlow itself sums the gradients of others."""
    if not traits_of(strategy).several_processes:
        return False
    # Eagerly one device's collective would wait for the next one's, which TensorFlow calls from a thread each.
    waits = tf.executing_eagerly() and len(strategy.extended.worker_devices) > 1
    return num_replicas(strategy) > 1 and not waits


def bucketed_all_reduce(strategy: tf.distribute.Strategy, grads: Sequence[Gradient], step: tf.Tensor) -> list[Gradient]:
    """Returns the gradients' sums over all replicas of several processes, in buckets; arguments as of `Reduction`. In cross-replica context."""
    group, local = communicator_for(strategy), strategy.experimental_local_results
    mine = [[local(grad)[place] for grad in grads] for place in range(len(group.ranks))]
    dense = [place for place, grad in enumerate(mine[0]) if not isinstance(grad, tf.IndexedSlices)]
    shapes = [("", tuple(mine[0][place].shape)) for place in dense]
    values = [[each[place] for place in dense] for each in mine]
    states = [[()] * len(dense) for _ in mine]
    totals = BucketedReduction(NONE, shapes).run(
        group, values, states, group.contexts(step), bucket_bytes=_bucket_bytes(strategy)
    )
    summed = dict(zip(dense, zip(*(each.sums for each in totals), strict=True), strict=True))
    for place in set(range(len(grads))) - set(dense):
        summed[place] = tuple(gather_deduplicated_rows(group, [each[place] for each in mine], NONE.row_codec, step))
    return [regroup(summed[place]) for place in range(len(grads))]


def gather_rows_in_process(strategy: tf.distribute.Strategy, grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the rows of all replicas of one process, for gradients that are `tf.IndexedSlices`. In cross-replica context.

    TensorFlow gathers them by a collective, which keeps the number of rows of an execution's first step: the step after it,
    of another number, ends in "Shape mismatch in the collective instance".
    """
    group, local = communicator_for(strategy), strategy.experimental_local_results
    step = tf.zeros([], tf.int64)
    return [regroup(tuple(gather_deduplicated_rows(group, local(grad), NONE.row_codec, step))) for grad in grads]


def gather_deduplicated_rows(
    group: Communicator, slices: Sequence[tf.IndexedSlices], rows: RowCodec, step: tf.Tensor
) -> list[tf.IndexedSlices]:
    """Returns all ranks' rows of a gradient, which stay rows, for each of this process's ranks, whose rows `slices` holds."""
    shape = slices[0].values.shape[1:]
    width = shape.num_elements()
    flat = [tf.IndexedSlices(rows.pack(tf.reshape(s.values, [-1, width])), s.indices, s.dense_shape) for s in slices]
    return [
        tf.IndexedSlices(tf.reshape(rows.unpack(s.values, width), [-1, *shape]), s.indices, s.dense_shape)
        for s in group.gather_rows(flat, step)
    ]


def _times(values: Sequence[Gradient], places: Sequence[int], factor: tf.Tensor) -> list[Gradient]:
    """Returns the values, those at the places multiplied."""
    return [gradient_lists.scale([value], factor)[0] if p in places else value for p, value in enumerate(values)]


def _bucket_bytes(strategy: tf.distribute.Strategy) -> int:
    ours = as_ours(strategy)
    return ours.bucket_bytes if ours else 0
