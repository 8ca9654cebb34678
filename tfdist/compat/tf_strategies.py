"""TensorFlow's mirrored strategies, with sums over replicas in an order that the caller decides.

TensorFlow adds the replicas of one process from left to right. Between processes it uses a ring, whose order depends on the position
in the tensor. This module uses private names: tests/architecture/test_keras_internals.py fails and names them if a release moves them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, cross_device_ops, mirrored_strategy, values

from tfdist.aliases import Structure
from tfdist.compat.tf_cluster import TF_CROSS_DEVICE_OPS
from tfdist.compat.tf_internals import regroup

Sums = Callable[[Sequence[Sequence[tf.Tensor]]], Sequence[Sequence[tf.Tensor]]]


class _Extended(collective_all_reduce_strategy.CollectiveAllReduceExtended):
    """TensorFlow's class, with an argument for the devices, and with the sums of `sum_by`, if it was called.

    TensorFlow's own class uses all GPUs, or one CPU, and sums by a ring over the devices.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: Any,
        options: Any,
        devices: Sequence[str],
        members: Sequence[int] | None,
    ):
        self._named_devices = devices
        self._members = members
        self.each_draws = False  # within `each_worker_draws`
        super().__init__(strategy, resolver, options)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        # TensorFlow has read the numbers of the cluster by now, and creates the group of this strategy's collectives after it.
        if self._members is not None:
            self._num_workers = len(self._members)
            rank: int = vars(self)["_id_in_cluster"]
            self._id_in_cluster = self._members.index(rank)
            self._is_chief = self._id_in_cluster == 0
            self._enable_check_health = False  # the strategy of all workers has it
        if not self._named_devices:
            return super()._initialize_local_devices(cluster_resolver, worker_device)
        names = [name.upper().rpartition("DEVICE:")[2].lstrip("/") for name in self._named_devices]
        return tuple(f"{worker_device}/device:{name}" for name in names), names[0].partition(":")[0]

    def _get_variable_creator_initial_value(self, *args: Any, **kwargs: Any) -> Any:
        base: Any = super()
        if self.each_draws:
            base = super(collective_all_reduce_strategy.CollectiveAllReduceExtended, self)
        return base._get_variable_creator_initial_value(*args, **kwargs)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Structure, options: Any = None) -> Structure:
        if isinstance(self._cross_device_ops, _OrderedAllReduce) and len(self.worker_devices) > 1:
            # A process adds the values of its own replicas first. The base class's method brings them together, by a merge_call.
            return tf.distribute.StrategyExtended._replica_ctx_all_reduce(self, reduce_op, value, options)
        return super()._replica_ctx_all_reduce(reduce_op, value, options)


class _OrderedAllReduce(cross_device_ops.CollectiveAllReduce):
    """All-reduce of dense tensors by `sums`."""

    sums: Sums

    def _all_reduce_per_replica_values(self, reduce_op: Any, per_replica_values: Any, options: Any) -> Any:
        replicas = list(zip(*(value.values for value in per_replica_values), strict=True))
        if _has_sparse(replicas[0]):
            return super()._all_reduce_per_replica_values(reduce_op, per_replica_values, options)
        results = self._totals(reduce_op, replicas)
        return [regroup(values_of_one, wrap_class=values.Mirrored) for values_of_one in zip(*results, strict=True)]

    def _all_reduce(self, reduce_op: Any, value: Structure, replica_id: int, options: Any) -> Structure:
        flat = tf.nest.flatten(value)
        if _has_sparse(flat) or len(self._devices) > 1:
            return super()._all_reduce(reduce_op, value, replica_id, options)
        return tf.nest.pack_sequence_as(value, self._totals(reduce_op, [flat])[0])

    def _totals(self, reduce_op: Any, replicas: Sequence[Sequence[Any]]) -> list[list[tf.Tensor]]:
        results = []
        totals = self.sums([[tf.convert_to_tensor(value) for value in tensors] for tensors in replicas])
        for device_name, device_totals in zip(self._devices, totals, strict=True):
            # A tensor for each replica, because `regroup` merges values that are the same object.
            with tf.device(device_name):
                results.append([tf.identity(value) for value in device_totals])
                if reduce_op == tf.distribute.ReduceOp.MEAN:
                    results[-1] = [value / self._group_size for value in results[-1]]
        return results


def _has_sparse(tensors: Sequence[Any]) -> bool:
    return any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors)


class _MirroredExtended(mirrored_strategy.MirroredExtended):
    """TensorFlow's class, which sums to a CPU by other operations; this one sums by `cross_device_ops` to any device."""

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        operations = self._cross_device_ops
        is_per_replica = isinstance(value, values.DistributedValues) and not isinstance(value, values.Mirrored)
        if is_per_replica and isinstance(operations, tf.distribute.ReductionToOneDevice):
            return operations.reduce(reduce_op, value, destinations)
        return super()._reduce_to(reduce_op, value, destinations, options)


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """TensorFlow's strategy, which uses `cross_device_ops` for all sums, also to a CPU."""

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None):
        tf.distribute.Strategy.__init__(self, _MirroredExtended(self, devices, cross_device_ops))


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """TensorFlow's strategy, with an argument for this worker's devices, such as `["CPU:0", "CPU:1"]`: by default all GPUs, or one CPU.

    `members` are the ranks of the cluster's workers that this strategy connects; None means all.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        devices: Sequence[str] = (),
        members: Sequence[int] | None = None,
    ):
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        tf.distribute.Strategy.__init__(self, _Extended(self, cluster_resolver, options, devices, members))


@contextlib.contextmanager
def each_worker_draws(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Makes each worker use its own initial values for variables that are created within the context, instead of the chief's."""
    strategy.extended.each_draws = True
    try:
        yield
    finally:
        strategy.extended.each_draws = False


def sum_by(strategy: tf.distribute.MultiWorkerMirroredStrategy, sums: Sums) -> None:
    """Makes a strategy sum dense tensors by `sums`, which takes and returns `[replicas of this worker][tensors]`."""
    extended = strategy.extended
    original = getattr(extended, TF_CROSS_DEVICE_OPS)
    ordered = _OrderedAllReduce(original._devices, original._group_size, original._options, original._collective_keys)
    ordered.sums = sums
    setattr(extended, TF_CROSS_DEVICE_OPS, ordered)
