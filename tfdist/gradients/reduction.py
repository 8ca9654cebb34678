"""The reduction of an optimizer's gradients over all replicas, uncompressed or through a compressor with its state.

If any replica's gradient is not finite, no state changes: a NaN in an error-feedback residual would never go away.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

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

# Lanes that no bucket uses.
_FLAG_LANE = -1
_UNCOMPRESSED_LANE = -2
_RESIDUAL = "residual"  # the state of `ErrorFeedback`
_REPEATS = 3


class Reduction(tf.Module):
    """The sums of gradients over all replicas, through a compressor, for an optimizer's variables in its order.

    Attributes:
        compressor: The compressor.
        left_out: The number of updates that this process has skipped because a gradient was not finite.
        states: The state of each variable.
    """

    def __init__(self, compressor: Compressor, variables: Sequence[keras.Variable]):
        super().__init__(name="compression")
        self._strategy = variables[0].value.distribute_strategy
        self._group = communicator_for(self._strategy)
        self._bucket_bytes = bucket_bytes(self._strategy)
        self._layout = BucketedReduction(compressor, [(v.path, tuple(v.shape)) for v in variables])
        self.compressor = compressor
        self.left_out = self._state(StateSpec("left_out", (), True), 0, "compression")
        self.states: list[list[tf.Variable]] = [
            [self._state(slot, number, variable.path) for slot in slots]
            for number, (slots, variable) in enumerate(zip(self._layout.slots, variables, strict=True))
        ]

    @property
    def residuals(self) -> list[tf.Variable]:
        """The residuals of error feedback."""
        return [
            state
            for states, slots in zip(self.states, self._layout.slots, strict=True)
            for state, slot in zip(states, slots, strict=True)
            if slot.name == _RESIDUAL
        ]

    def _state(self, slot: StateSpec, number: int, path: str) -> tf.Variable:
        synchronization = tf.VariableSynchronization.ON_READ
        aggregation = tf.VariableAggregation.SUM
        if slot.shared:
            synchronization = tf.VariableSynchronization.AUTO
            aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
        with self._strategy.scope(), tf.init_scope():
            return tf.Variable(
                slot.initial(slot.shape, number),
                trainable=False,
                name=f"{path}/{slot.name}",
                synchronization=synchronization,
                aggregation=aggregation,
            )

    def __call__(
        self, grads: Sequence[Gradient], numbers: Sequence[int], step: tf.Tensor, scale: tf.Tensor | None = None
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Returns the gradients' sums, and whether all of them are finite. In cross-replica context.

        `grads` have a value per replica, `numbers` are the indices of their variables, and `step` is the number of updates so far.
        `scale` is the factor by which the gradients are multiplied, None for 1.
        """
        local_grads = _by_replica(self._strategy, grads, len(self._group.ranks))
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
        results = self._sum_dense(_chosen(local_grads, dense), owners, members)
        # The finiteness flag depends on every gradient, so it uses its own lane; where collectives are totally ordered (NCCL) it is
        # issued last. Otherwise the buckets would wait for the last gradient, instead of being sent while others are computed.
        other_sums = self._all_reduce_uncompressed(_chosen(local_grads, other), members, _UNCOMPRESSED_LANE)
        flags = [[gradient_lists.nan_unless_finite(values)] for values in local_grads]
        finite_flags = self._all_reduce_uncompressed(flags, members, _FLAG_LANE)
        reduced: list[list[Gradient]] = [[None] * len(grads) for _ in members]
        for totals, of_dense, of_others in zip(reduced, results, other_sums, strict=True):
            for index, total in zip((*dense, *other), (*of_dense.sums, *of_others), strict=True):
                totals[index] = total
        for index in sparse:
            compressor = self._layout.compressors[numbers[index]] if index in compressed else NONE
            slices = [values[index] for values in local_grads]
            rows = gather_deduplicated_rows(self._group, slices, compressor.row_codec, members[0].step)
            for totals, gathered in zip(reduced, rows, strict=True):
                totals[index] = gathered
        if scale is not None:
            reduced = [_times(values, compressed, scale) for values in reduced]
        # The local gradients of all ranks must be finite, because a compressor may turn a NaN into a finite value. So must the sum,
        # which may overflow. Both are equal on all ranks, so all ranks take the same branch below.
        finite = tf.math.is_finite(finite_flags[0][0] + gradient_lists.nan_unless_finite(reduced[0]))
        self._store_if(finite, results, owners)
        return [regroup(per_replica) for per_replica in zip(*reduced, strict=True)], finite

    def _sum_dense(
        self, local_grads: Sequence[list[Gradient]], owners: Sequence[int], members: Sequence[RankContext]
    ) -> Sequence[Any]:
        """Returns the compressor's results for dense gradients of the variables `owners`, for each of this process's ranks."""
        local = self._strategy.experimental_local_results
        states = [
            [tuple(local(s)[replica].read_value() for s in self.states[number]) for number in owners]
            for replica in range(len(members))
        ]
        return self._layout.run(self._group, local_grads, states, members, owners, self._bucket_bytes)

    def _store_if(self, finite: tf.Tensor, results: Sequence[Any], owners: Sequence[int]) -> None:
        """Stores the compressor's new states if all gradients are finite, else counts an update that is left out."""
        local = self._strategy.experimental_local_results

        def store_states() -> tf.Tensor:
            for replica, result in enumerate(results):
                for number, new_states in zip(owners, result.states, strict=True):
                    for variable, state in zip(self.states[number], new_states, strict=True):
                        local(variable)[replica].assign(state)
            return tf.constant(True)

        def count_skipped() -> tf.Tensor:
            for component in local(self.left_out):
                component.assign_add(1)
            return tf.constant(False)

        tf.cond(finite, store_states, count_skipped)

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

    def seconds(self) -> tuple[float, float]:
        """Returns the least seconds of some reductions with and without the compressor. A collective."""
        plain = BucketedReduction(NONE, [("", shape) for shape in self._layout.shapes])
        return self._timed(self._layout), self._timed(plain)

    def _timed(self, layout: BucketedReduction) -> float:
        @functools.partial(tf.function, autograph=False)
        def exchange(values: list[tf.Tensor]) -> tf.Tensor:
            members = self._group.contexts(tf.constant(2**40, tf.int64))  # after any warm-up
            states = [tuple(tf.zeros(slot.shape) for slot in slots) for slots in layout.slots]
            ranks = len(members)
            results = layout.run(
                self._group, [values] * ranks, [states] * ranks, members, bucket_bytes=self._bucket_bytes
            )
            return tf.add_n([tf.reduce_sum(total) for total in results[0].sums])

        values = [tf.random.stateless_normal(shape, [1, 2]) for shape in layout.shapes]
        exchange(values)
        durations = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            exchange(values).numpy()  # waits for the result
            durations.append(time.perf_counter() - began)
        return min(durations)


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
    group = communicator_for(strategy)
    local_grads = _by_replica(strategy, grads, len(group.ranks))
    dense = [index for index, grad in enumerate(local_grads[0]) if not isinstance(grad, tf.IndexedSlices)]
    layout = BucketedReduction(NONE, [("", tuple(local_grads[0][index].shape)) for index in dense])
    states = [[()] * len(dense) for _ in local_grads]
    results = layout.run(
        group, _chosen(local_grads, dense), states, group.contexts(step), bucket_bytes=bucket_bytes(strategy)
    )
    sums = dict(zip(dense, zip(*(result.sums for result in results), strict=True), strict=True))
    for index in range(len(grads)):
        if index not in sums:
            slices = [replica_grads[index] for replica_grads in local_grads]
            sums[index] = tuple(gather_deduplicated_rows(group, slices, NONE.row_codec, step))
    return [regroup(sums[index]) for index in range(len(grads))]


def gather_rows_in_process(strategy: tf.distribute.Strategy, grads: Sequence[Gradient]) -> list[Gradient]:
    """Returns the rows of all replicas of one process, for gradients that are `tf.IndexedSlices`. In cross-replica context.

    TensorFlow gathers rows by a collective that expects the number of rows of an execution's first step. A later step with another
    number would fail with "Shape mismatch in the collective instance".
    """
    group = communicator_for(strategy)
    step = tf.zeros([], tf.int64)
    gathered = []
    for grad in grads:
        slices = strategy.experimental_local_results(grad)
        gathered.append(regroup(tuple(gather_deduplicated_rows(group, slices, NONE.row_codec, step))))
    return gathered


def gather_deduplicated_rows(
    group: Communicator, slices: Sequence[tf.IndexedSlices], rows: RowCodec, step: tf.Tensor
) -> list[tf.IndexedSlices]:
    """Returns, for each of this process's ranks, all ranks' rows of a gradient; `slices` holds the rows of this process's ranks."""
    shape = slices[0].values.shape[1:]
    width = shape.num_elements()

    def pack(values: tf.Tensor) -> tf.Tensor:
        return rows.pack(tf.reshape(values, [-1, width]))

    def unpack(packed: tf.Tensor) -> tf.Tensor:
        return tf.reshape(rows.unpack(packed, width), [-1, *shape])

    gathered = group.gather_rows([gradient_lists.map_values(pack, s) for s in slices], step)
    return [gradient_lists.map_values(unpack, s) for s in gathered]


def _by_replica(strategy: tf.distribute.Strategy, grads: Sequence[Gradient], replicas: int) -> list[list[Gradient]]:
    """Returns the gradients of each replica of this process, `[replicas][gradients]`."""
    local = strategy.experimental_local_results
    return [[local(grad)[replica] for grad in grads] for replica in range(replicas)]


def _chosen(local_grads: Sequence[Sequence[Gradient]], indices: Sequence[int]) -> list[list[Gradient]]:
    """Returns the gradients at `indices` of each replica."""
    return [[grads[index] for index in indices] for grads in local_grads]


def _times(values: Sequence[Gradient], indices: Sequence[int], factor: tf.Tensor) -> list[Gradient]:
    """Returns the values, with those at `indices` multiplied by `factor`."""
    scaled = list(values)
    for index in indices:
        (scaled[index],) = gradient_lists.scale([values[index]], factor)
    return scaled


def bucket_bytes(strategy: tf.distribute.Strategy) -> int:
    """Returns the size of the buckets in which gradients are summed; 0 means one bucket."""
    ours = as_ours(strategy)
    return ours.config.bucket_bytes if ours and ours.traits.several_processes else 0
