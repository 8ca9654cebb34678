"""Exchanges between processes, by TensorFlow's collectives (its ring, or NCCL)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.communicator import Communicator
from tfdist.collectives.requests import flatten, unflatten
from tfdist.compat import tf_cluster, tf_internals

_PIECES = 8  # at most, of 4 MB or less, in which a rank's part of a sum travels: one is added while the next one comes
_LANES = 16  # at most; a collective keeps a thread for as long as it takes
_KEYS, _RESERVED_KEYS = 2**20, 1000  # more keys than a step has collectives; more steps than an execution has


class CrossProcessCommunicator(Communicator):
    """Ranks in several processes.

    Args:
        strategy: Which runs them.
    """

    def __init__(self, strategy: tf.distribute.MultiWorkerMirroredStrategy):
        self._launchers = tf_cluster.launchers(strategy)
        self._tokens: dict[tuple[str, int], Any] = {}
        ids = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
        ranks = [int(number) for number in strategy.experimental_local_results(ids)]
        super().__init__(ranks, tf_internals.num_replicas(strategy))

    def _all_reduce(self, tensors: list[Sequence[tf.Tensor]], largest: bool) -> list[list[tf.Tensor]]:
        results = []
        for values, launcher in zip(tensors, self._launchers, strict=True):
            totals = list(values)
            for dtype in dict.fromkeys(value.dtype for value in values):
                # TensorFlow refuses to cut nothing into pieces.
                places = [
                    p for p, value in enumerate(values) if value.dtype == dtype and value.shape.num_elements() != 0
                ]
                if not places:
                    continue
                same = [values[place] for place in places]
                total = self._launch(
                    tf_cluster.all_reduce,
                    launcher,
                    flatten(same) if len(same) > 1 else same[0],
                    merge_op="Max" if largest else "Add",
                    max_subdivs_per_device=_PIECES,
                )
                for place, value in zip(places, unflatten(total, same) if len(same) > 1 else [total], strict=True):
                    totals[place] = value
            results.append(totals)
        return results

    def _all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [
            tf.ensure_shape(
                self._launch(tf_cluster.all_gather, launcher, tensor[tf.newaxis]), [self.size, *tensor.shape]
            )
            for tensor, launcher in zip(tensors, self._launchers, strict=True)
        ]

    def _all_to_all(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [
            self._launch(tf_cluster.all_to_all, launcher, tensor)
            for tensor, launcher in zip(tensors, self._launchers, strict=True)
        ]

    def gather(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        return [self._gather(launcher, each, step) for launcher, each in zip(self._launchers, tensors, strict=True)]

    def _gather(self, launcher: Any, tensor: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        # Of one execution TensorFlow takes collectives with equal keys for the same one, with the same shape. Its own gathering
        # of rows fails where two steps of an execution have different numbers of them.
        number = (tf.cast(step % _RESERVED_KEYS, tf.int32) + 1) * _KEYS
        return self._launch(tf_cluster.all_gather, launcher, tensor, number)

    def gather_rows(self, slices: list[tf.IndexedSlices], step: tf.Tensor) -> list[tf.IndexedSlices]:
        results = []
        for each, launcher in zip(slices, self._launchers, strict=True):
            counts = self._gather(launcher, tf.shape(each.indices), step)
            most = tf.reduce_max(counts)
            rest = most - tf.shape(each.indices)[0]
            rows = self._gather(launcher, tf.pad(each.values, [[0, rest], [0, 0]]), step)
            places = self._gather(launcher, tf.pad(each.indices, [[0, rest]]), step)
            present = tf.reshape(tf.sequence_mask(counts, most), [-1])
            rows = tf.ensure_shape(rows, [None, each.values.shape[1]])
            places = tf.ensure_shape(places, [None])
            present = tf.ensure_shape(present, [None])
            results.append(
                tf.IndexedSlices(tf.boolean_mask(rows, present), tf.boolean_mask(places, present), each.dense_shape)
            )
        return results

    def _launch(self, collective: Any, launcher: Any, tensor: tf.Tensor, key: Any = 0, **how: Any) -> tf.Tensor:
        options = tf_cluster.options(launcher)
        with tf.device(tf_cluster.device(launcher)):
            return collective(
                tensor,
                *tf_cluster.group(launcher),
                tf_cluster.next_key(launcher) + key,
                communication_hint=options.implementation.value,
                timeout=options.timeout_seconds or 0,
                ordering_token=self._token(launcher),
                **how,
            )

    def _token(self, launcher: Any) -> tf.Tensor:
        """Returns that on which a lane's collectives wait for each other: TensorFlow lets all wait for all."""
        device = tf_cluster.device(launcher)
        if "GPU" in device:  # NCCL wants the same order on all ranks
            return tf_cluster.ordering_token(launcher)
        key = device, self._lane if self._lane < 0 else self._lane % _LANES
        if key not in self._tokens:
            with tf.init_scope(), tf.device(device):
                self._tokens[key] = tf_cluster.ResourceVariable(0.0)
        return self._tokens[key].handle
