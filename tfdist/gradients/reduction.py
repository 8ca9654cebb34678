"""The reduction of an optimizer's gradients over all replicas, uncompressed or through a compressor with its state.

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

_FLAG_LANE, _UNCOMPRESSED_LANE = -1, -2  # lanes that no bucket uses


class Reduction(tf.Module):
    """The sums of gradients over all replicas, through a compressor, for an optimizer's variables in its order.

    Attributes:
        slots: The specs of the compressor's state of each variable, by the variable's index.
        left_out: The number of updates that this process has skipped because a gradient was not finite.
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

        Args:
            grads: The gradients, each with a value per replica, dense or `tf.IndexedSlices`.
            numbers: The index of each gradient's variable.
            step: The number of updates so far.
            scale: The factor by which the gradients are multiplied; error-feedback residuals are kept without it. None means 1.
        """
        local = self._strategy.experimental_local_results
        replicas = range(len(self._group.ranks))  # of this process
        local_grads = [[local(grad)[replica] for grad in grads] for replica in replicas]
        compressed = [index for index, grad in enumerate(local_grads[0]) if grad.dtype == tf.float32]
        # Residuals of error feedback outlive a change of the loss scale, so they are kept for unscaled gradients. Gradients that are
        # not compressed have no residual and stay scaled: unscaled ones of 16 bits might underflow to 0.
        if scale is not None:
            local_grads = [_times(values, compressed, 1 / scale) for values in local_grads]
        sparse = [index for index, grad in enumerate(local_grads[0]) if isinstance(grad, tf.IndexedSlices)]
        dense = [index for index in compressed if index not in sparse]
        other = [index for index in range(len(grads)) if index not in (*dense, *sparse)]
        owners = [numbers[index] for index in dense]

        members = self._group.contexts(tf.cast(step, tf.int64))
        states = [
            [tuple(local(s)[replica].read_value() for s in self.states[number]) for number in owners]
            for replica in replicas
        ]
        results = self._layout.run(
            self._group,
            [[values[index] for index in dense] for values in local_grads],
            states,
            members,
            owners,
            self._bucket_bytes,
        )
        # The finiteness flag depends on every gradient, so it uses its own lane; where collectives are totally ordered (NCCL) it is
        # issued last. Otherwise the buckets would wait for the last gradient, instead of being sent while others are computed.
        other_sums = self._all_reduce_uncompressed(
            [[values[index] for index in other] for values in local_grads], members, _UNCOMPRESSED_LANE
        )
        finite_flags = self._all_reduce_uncompressed(
            [[gradient_lists.nan_unless_finite(values)] for values in local_grads], members, _FLAG_LANE
        )
        reduced: list[list[Gradient]] = [[None] * len(grads) for _ in replicas]
        for totals, of_dense, of_others in zip(reduced, results, other_sums, strict=True):
            for index, total in zip((*dense, *other), (*of_dense.sums, *of_others), strict=True):
                totals[index] = total
        for index in sparse:
            codec = self._layout.compressors[numbers[index]].row_codec if index in compressed else NONE.row_codec
            slices = [values[index] for values in local_grads]
            rows = gather_deduplicated_rows(self._group, slices, codec, members[0].step)
            for totals, gathered in zip(reduced, rows, strict=True):
                totals[index] = gathered
        if scale is not None:
            reduced = [_times(values, compressed, scale) for values in reduced]
        # The local gradients of all ranks must be finite, because a compressor may turn a NaN into a finite value. So must the sum,
        # which may overflow. Both are equal on all ranks, so all ranks take the same branch below.
        finite = tf.math.is_finite(finite_flags[0][0] + gradient_lists.nan_unless_finite(reduced[0]))

        def store_states() -> tf.Tensor:
            for replica, result in enumerate(results):
                for number, new_states in zip(owners, result.states, strict=True):
                    for variable, state in zip(self.states[number], new_states, strict=True):
                        local(variable)[replica].assign(state)
            return tf.constant(True)

        def count_skipped() -> tf.Tensor:
            for replica in replicas:
                local(self.left_out)[replica].assign_add(1)
            return tf.constant(False)

        tf.cond(finite, store_states, count_skipped)
        if scale is not None:
            # Compression may turn a NaN into a finite value. Restore the NaN, because `LossScaleOptimizer` lowers its scale on NaN.
            reduced = [gradient_lists.scale(values, tf.where(finite, 1.0, float("nan"))) for values in reduced]
        return [regroup(per_replica) for per_replica in zip(*reduced, strict=True)], finite

    def _all_reduce_uncompressed(
        self, values: Sequence[list[Gradient]], members: Sequence[RankContext], lane: int
    ) -> list[list[Gradient]]:
        """Returns the sums of `values` over all ranks, for each of this process's ranks."""
        if not values[0]:
            return [[] for _ in values]
        exchanges = [
            NONE.exchange(local_values, [()] * len(local_values), member)
            for local_values, member in zip(values, members, strict=True)
        ]
        return [reduced.sums for reduced in self._group.run(exchanges, lane)]

    def seconds(self, repeats: int = 3) -> tuple[float, float]:
        """Returns the median seconds of `repeats` reductions with and without the compressor. A collective."""

        def timed(layout: BucketedReduction) -> float:
            @functools.partial(tf.function, autograph=False)
            def exchange() -> tf.Tensor:
                members = self._group.contexts(tf.constant(2**40, tf.int64))  # after any warm-up
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
            durations = []
            for _ in range(repeats):
                began = time.perf_counter()
                exchange().numpy()  # waits for the result
                durations.append(time.perf_counter() - began)
            return statistics.median(durations)

        return timed(self._layout), timed(BucketedReduction(NONE, [("", shape) for shape in self._layout.shapes]))


def uses_bucketed_all_reduce(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether this strategy uses `bucketed_all_reduce`; otherwise TensorFlow sums the gradients."""
    if not traits_of(strategy).several_processes:
        return False
    # In eager mode TensorFlow calls each device's collective from its own thread, and one would wait for the next.
    waits = tf.executing_eagerly() and len(strategy.extended.worker_devices) > 1
    return num_replicas(strategy) > 1 and not waits


def bucketed_all_reduce(strategy: tf.distribute.Strategy, grads: Sequence[Gradient], step: tf.Tensor) -> list[Gradient]:
    """Returns the gradients' sums over all replicas of several processes, in buckets. In cross-replica context.

    `grads` and `step` are as for `Reduction`.
    """
    group, local = communicator_for(strategy), strategy.experimental_local_results
    local_grads = [[local(grad)[replica] for grad in grads] for replica in range(len(group.ranks))]
    dense = [index for index, grad in enumerate(local_grads[0]) if not isinstance(grad, tf.IndexedSlices)]
    shapes = [("", tuple(local_grads[0][index].shape)) for index in dense]
    values = [[replica_grads[index] for index in dense] for replica_grads in local_grads]
    states = [[()] * len(dense) for _ in local_grads]
    results = BucketedReduction(NONE, shapes).run(
        group, values, states, group.contexts(step), bucket_bytes=_bucket_bytes(strategy)
    )
    sums = dict(zip(dense, zip(*(result.sums for result in results), strict=True), strict=True))
    for index in set(range(len(grads))) - set(dense):
        slices = [replica_grads[index] for replica_grads in local_grads]
        sums[index] = tuple(gather_deduplicated_rows(group, slices, NONE.row_codec, step))
    return [regroup(sums[index]) for index in range(len(grads))]


def gather_rows_in_process(strategy: tf.distribute.Strategy, grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the rows of all replicas of one process, for gradients that are `tf.IndexedSlices`. In cross-replica context.

    TensorFlow gathers rows by a collective that expects the number of rows of an execution's first step. A later step with another
    number would fail with "Shape mismatch in the collective instance".
    """
    group, local = communicator_for(strategy), strategy.experimental_local_results
    step = tf.zeros([], tf.int64)
    return [regroup(tuple(gather_deduplicated_rows(group, local(grad), NONE.row_codec, step))) for grad in grads]


def gather_deduplicated_rows(
    group: Communicator, slices: Sequence[tf.IndexedSlices], rows: RowCodec, step: tf.Tensor
) -> list[tf.IndexedSlices]:
    """Returns, for each of this process's ranks, all ranks' rows of a gradient; `slices` holds the rows of this process's ranks."""
    shape = slices[0].values.shape[1:]
    width = shape.num_elements()
    flat = [tf.IndexedSlices(rows.pack(tf.reshape(s.values, [-1, width])), s.indices, s.dense_shape) for s in slices]
    return [
        tf.IndexedSlices(tf.reshape(rows.unpack(s.values, width), [-1, *shape]), s.indices, s.dense_shape)
        for s in group.gather_rows(flat, step)
    ]


def _times(values: Sequence[Gradient], indices: Sequence[int], factor: tf.Tensor) -> list[Gradient]:
    """Returns the values, with those at `indices` multiplied by `factor`."""
    return [gradient_lists.scale([value], factor)[0] if i in indices else value for i, value in enumerate(values)]


def _bucket_bytes(strategy: tf.distribute.Strategy) -> int:
    ours = as_ours(strategy)
    return ours.bucket_bytes if ours else 0
