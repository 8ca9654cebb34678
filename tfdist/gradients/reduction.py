"""The reduction of an optimizer's gradients over all replicas, uncompressed or through a compressor with its state.

If any replica's gradient is not finite, no state changes: a NaN in an error-feedback residual would never go away.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import Gradient
from tfdist.collectives.communicator import Communicator, communicator_for
from tfdist.collectives.requests import RankContext, ReduceResult
from tfdist.compat.tf_internals import num_replicas, regroup
from tfdist.compression.base import NONE, BucketedReduction, Compressor, RowCodec, StateSpec
from tfdist.compression.candidates import UNDECIDED, Candidates
from tfdist.compression.fidelity import NOT_MEASURED, Check, Measures
from tfdist.config.strategy_traits import traits_of
from tfdist.gradients import gradient_lists
from tfdist.strategy import as_ours

# Lanes that no bucket uses.
_FLAG_LANE = -1
_UNCOMPRESSED_LANE = -2
_CHECK_LANE = -4
_RESIDUAL = "residual"  # the state of `ErrorFeedback`


class Reduction(tf.Module):
    """The sums of gradients over all replicas, through a compressor, for an optimizer's variables in its order.

    With several candidates a new trace of the step uses the one that `used` names.

    Attributes:
        candidates: The compressors, one or several.
        used: The index of the compressor in use.
        left_out: The number of updates that this process has skipped because a gradient was not finite.
        selection: With several candidates, the chosen one or `UNDECIDED`, and the last one that may be chosen; else None.
        fidelity: With a guard, the `Measures` of the last check; else None.
    """

    def __init__(self, compressor: Compressor, variables: Sequence[keras.Variable]):
        super().__init__(name="compression")
        self._strategy = variables[0].value.distribute_strategy
        self._group = communicator_for(self._strategy)
        self._bucket_bytes = bucket_bytes(self._strategy)
        named = [(v.path, tuple(v.shape)) for v in variables]
        self.candidates: tuple[Compressor, ...] = (compressor,)
        self.selection = self.fidelity = None
        self.left_out = self._state(StateSpec("left_out", (), True), 0, "compression")
        if isinstance(compressor, Candidates):
            self.candidates = compressor.compressors
            if len(self.candidates) > 1:
                start = [UNDECIDED, len(self.candidates) - 1]
                spec = StateSpec("selection", (2,), True, lambda *_: tf.constant(start, tf.int64))
                self.selection = self._state(spec, 0, "compression")
            if compressor.guard:
                spec = StateSpec("fidelity", (len(Measures._fields),), True, lambda s, _: tf.zeros(s, tf.float64))
                self.fidelity = self._state(spec, 0, "compression")
        self._layouts = [BucketedReduction(each, named) for each in self.candidates]
        self.used = 0
        # Candidates share a state of the same name and shape, such as the residual: only one of them is in use.
        self._all_states: list[tf.Variable] = []
        # TensorFlow saves no dict of variables whose keys are tuples.
        self._places: list[dict[Any, int]] = [{} for _ in variables]
        for layout in self._layouts:
            for number, (slots, variable) in enumerate(zip(layout.slots, variables, strict=True)):
                for key, slot in _keyed(slots):
                    if key not in self._places[number]:
                        self._places[number][key] = len(self._all_states)
                        self._all_states.append(self._state(slot, number, variable.path))

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        return self.candidates[self.used]

    @property
    def states(self) -> list[list[tf.Variable]]:
        """The state of each variable for the compressor in use."""
        return [
            [self._all_states[places[key]] for key, _ in _keyed(slots)]
            for places, slots in zip(self._places, self._layouts[self.used].slots, strict=True)
        ]

    @property
    def residuals(self) -> list[tf.Variable]:
        """The residuals of error feedback of the compressor in use."""
        return [
            state
            for states, slots in zip(self.states, self._layouts[self.used].slots, strict=True)
            for state, slot in zip(states, slots, strict=True)
            if slot.name == _RESIDUAL
        ]

    @property
    def stored_selection(self) -> tuple[int, int]:
        """The value of `selection` on this process; that of a single candidate is (0, 0)."""
        if self.selection is None:
            return 0, 0
        choice, last = self._strategy.experimental_local_results(self.selection)[0].numpy().tolist()
        return choice, last

    @property
    def measures(self) -> Measures:
        """The guard's last check."""
        if self.fidelity is None:
            return NOT_MEASURED
        return Measures(*self._strategy.experimental_local_results(self.fidelity)[0].numpy().tolist())

    def reset(self) -> None:
        """Sets the state of the compressor in use, and of its guard, to its initial values."""
        for number, (slots, states) in enumerate(zip(self._layouts[self.used].slots, self.states, strict=True)):
            for slot, state in zip(slots, states, strict=True):
                self.assign(state, slot.initial(slot.shape, number))
        if self.fidelity is not None:
            self.assign(self.fidelity, NOT_MEASURED)

    def assign(self, variable: tf.Variable, value: Any) -> None:
        """Assigns a value to a state on all devices of this process. Outside of a step."""
        for component in self._strategy.experimental_local_results(variable):
            component.assign(value)

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
        local = self._strategy.experimental_local_results
        replicas = range(len(self._group.ranks))  # of this process
        local_grads = _by_replica(self._strategy, grads, len(replicas))
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
        variables = self.states
        states = [
            [tuple(local(s)[replica].read_value() for s in variables[number]) for number in owners]
            for replica in replicas
        ]
        dense_grads = _chosen(local_grads, dense)
        layout = self._layouts[self.used]
        check = None
        if self.fidelity is not None and self.compressor != NONE:
            check = Check(members[0].step)
        results = layout.run(self._group, dense_grads, states, members, owners, self._bucket_bytes, check)
        residual_ratio = self._residual_ratio(check, dense_grads, results, owners)
        # The finiteness flag depends on every gradient, so it uses its own lane; where collectives are totally ordered (NCCL) it is
        # issued last. Otherwise the buckets would wait for the last gradient, instead of being sent while others are computed.
        other_sums = self._all_reduce_uncompressed(_chosen(local_grads, other), members, _UNCOMPRESSED_LANE)
        flags = [[gradient_lists.nan_unless_finite(values)] for values in local_grads]
        finite_flags = self._all_reduce_uncompressed(flags, members, _FLAG_LANE)
        reduced: list[list[Gradient]] = [[None] * len(grads) for _ in replicas]
        for totals, of_dense, of_others in zip(reduced, results, other_sums, strict=True):
            for index, total in zip((*dense, *other), (*of_dense.sums, *of_others), strict=True):
                totals[index] = total
        for index in sparse:
            compressor = layout.compressors[numbers[index]] if index in compressed else NONE
            slices = [values[index] for values in local_grads]
            rows = gather_deduplicated_rows(self._group, slices, compressor.row_codec, members[0].step)
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
                    for variable, state in zip(variables[number], new_states, strict=True):
                        local(variable)[replica].assign(state)
                if check:
                    fidelity = local(self.fidelity)[replica]
                    fidelity.assign(check.after(fidelity.read_value(), residual_ratio))
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

    def _residual_ratio(
        self,
        check: Check | None,
        local_grads: Sequence[Sequence[tf.Tensor]],
        results: Sequence[ReduceResult],
        owners: Sequence[int],
    ) -> tf.Tensor:
        """Returns |residuals| / |gradients| over all ranks, `[1]` float64; 0 without error feedback, and if no check is due."""
        slots = self._layouts[self.used].slots
        places = [
            (index, place)
            for index, number in enumerate(owners)
            for place, slot in enumerate(slots[number])
            if slot.name == _RESIDUAL
        ]
        if not (check and places):
            return tf.zeros([1], tf.float64)
        exchanges = []
        for grads, result in zip(local_grads, results, strict=True):
            residuals = [result.states[index][place] for index, place in places]
            exchanges.append(check.compare_residuals([grads[index] for index, _ in places], residuals))
        return self._group.run(exchanges, _CHECK_LANE)[0]

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
        """Returns the least seconds of `repeats` reductions with and without the compressor. A collective."""
        plain = BucketedReduction(NONE, [("", shape) for shape in self._layouts[0].shapes])
        return self._timed(self._layouts[self.used], repeats), self._timed(plain, repeats)

    def candidate_seconds(self, index: int, repeats: int = 5) -> float:
        """Returns the least seconds of `repeats` reductions of numbers of the gradients' sizes with a candidate. A collective."""
        return self._timed(self._layouts[index], repeats)

    def _timed(self, layout: BucketedReduction, repeats: int) -> float:
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
        for _ in range(repeats):
            began = time.perf_counter()
            exchange(values).numpy()  # waits for the result
            durations.append(time.perf_counter() - began)
        return min(durations)


def _keyed(slots: Sequence[StateSpec]) -> Iterator[tuple[Any, StateSpec]]:
    """Yields the specs of a variable's state, each with a key that is equal for those that candidates share."""
    for place, slot in enumerate(slots):
        yield (place, slot.name, slot.shape), slot


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
    return ours.bucket_bytes if ours else 0
