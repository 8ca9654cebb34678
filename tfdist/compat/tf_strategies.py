"""TensorFlow's mirrored strategies, with sums over replicas in an order that the caller decides.

TensorFlow adds the replicas of one process from left to right, and those of several by a ring, whose order depends on the place in the
tensor. A release may move the private names that are used here: tests/architecture/test_keras_internals.py says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, cross_device_ops, mirrored_strategy, values

from tfdist.aliases import Structure
from tfdist.compat.tf_cluster import TF_CROSS_DEVICE_OPS
from tfdist.compat.tf_internals import regroup

Sums = Callable[[Sequence[Sequence[tf.Tensor]]], Sequence[Sequence[tf.Tensor]]]


class _Extended(collective_all_reduce_strategy.CollectiveAllReduceExtended):
    """Uses the devices it is given, and sums by a function of ours, if there is one.

    TensorFlow uses all GPUs, or one CPU, and sums by a ring over the devices.
    """

    def __init__(self, strategy: tf.distribute.Strategy, resolver: Any, options: Any, devices: Sequence[str]):
        self._named_devices = devices
        super().__init__(strategy, resolver, options)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        if not self._named_devices:
            return super()._initialize_local_devices(cluster_resolver, worker_device)
        names = [name.upper().rpartition("DEVICE:")[2].lstrip("/") for name in self._named_devices]
        return tuple(f"{worker_device}/device:{name}" for name in names), names[0].partition(":")[0]

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Structure, options: Any = None) -> Structure:
        if isinstance(self._cross_device_ops, _OrderedAllReduce) and len(self.worker_devices) > 1:
            # A process adds the values of its own replicas first, so they must meet: by the method of TensorFlow's base class.
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
        totals = self.sums([[tf.convert_to_tensor(value) for value in own] for own in replicas])
        for device_name, own in zip(self._devices, totals, strict=True):
            with tf.device(device_name):  # an identity of its own, or TensorFlow takes the replicas' results for one
                results.append([tf.identity(value) for value in own])
                if reduce_op == tf.distribute.ReduceOp.MEAN:
                    results[-1] = [value / self._group_size for value in results[-1]]
        return results


def _has_sparse(tensors: Sequence[Any]) -> bool:
    return any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors)


class _MirroredExtended(mirrored_strategy.MirroredExtended):
    """Sums to any device by the given operations. TensorFlow sums to a CPU by operations of its own."""

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        operations = self._cross_device_ops
        is_own = isinstance(value, values.DistributedValues) and not isinstance(value, values.Mirrored)
        if is_own and isinstance(operations, tf.distribute.ReductionToOneDevice):
            return operations.reduce(reduce_op, value, destinations)
        return super()._reduce_to(reduce_op, value, destinations, options)


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """TensorFlow's strategy, which uses the operations that it is given for all sums.

    Args:
        devices: As of TensorFlow.
        cross_device_ops: As of TensorFlow.
    """

    def __init__(self, devices: Sequence[str] | None = None, cross_device_ops: Any = None):
        tf.distribute.Strategy.__init__(self, _MirroredExtended(self, devices, cross_device_ops))


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """TensorFlow's strategy, on the devices that it is given.

    Args:
        cluster_resolver: As of TensorFlow.
        communication_options: As of TensorFlow.
        devices: The names of the devices of this worker, such as `["CPU:0", "CPU:1"]`. By default all GPUs, or one CPU.
    """

    def __init__(self, cluster_resolver: Any = None, communication_options: Any = None, devices: Sequence[str] = ()):
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        tf.distribute.Strategy.__init__(self, _Extended(self, cluster_resolver, options, devices))


def sum_by(strategy: tf.distribute.MultiWorkerMirroredStrategy, sums: Sums) -> None:
    """Makes a strategy sum dense tensors by a function, of `[replicas of this worker][tensors]` to the same."""
    extended = strategy.extended
    own = getattr(extended, TF_CROSS_DEVICE_OPS)
    ordered = _OrderedAllReduce(own._devices, own._group_size, own._options, own._collective_keys)
    ordered.sums = sums
    setattr(extended, TF_CROSS_DEVICE_OPS, ordered)
