"""Executes the collectives that exchanges request (see `requests.py`), within a process and between processes."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.aliases import Launcher
from tfdist.collectives.requests import AllGather, AllReduce, Cond, RankContext, flatten, unflatten
from tfdist.compat import tf_cluster, tf_internals
from tfdist.config.strategy_traits import traits_of
from tfdist.errors import ConfigError

Result = TypeVar("Result")
_PIECES = 8  # maximum per rank's part of a sum, 4 MB or less each: a rank adds one piece while it receives the next
_LANES = 16  # maximum number of lanes, because each running collective occupies a thread
# _KEYS exceeds the number of collectives in a step, _RESERVED_KEYS the number of steps in an execution.
_KEYS, _RESERVED_KEYS = 2**20, 1000


class Communicator(abc.ABC):
    """Runs the exchanges of this process's ranks, with all ranks of the group.

    Args:
        ranks: The ranks in this process.
        size: The number of ranks in all processes.
    """

    def __init__(self, ranks: Sequence[int], size: int):
        self.ranks = list(ranks)
        self.size = size
        self._lane = 0

    def contexts(self, step: tf.Tensor) -> list[RankContext]:
        """Returns the context of each rank in this process."""
        return [RankContext(rank, self.size, step) for rank in self.ranks]

    def run(self, exchanges: Sequence[Generator[Any, Any, Result]], lane: int = 0) -> list[Result]:
        """Runs the exchanges of this process's ranks to their end; returns their results.

        Args:
            exchanges: One for each rank.
            lane: Exchanges on different lanes (modulo 16) run concurrently.
        """
        outer_lane, self._lane = self._lane, lane
        answers: list[Any] = [None] * len(exchanges)
        while True:
            requests, results = [], []
            for exchange, answer in zip(exchanges, answers, strict=True):
                try:
                    requests.append(exchange.send(answer))
                except StopIteration as e:
                    results.append(e.value)
            if results:
                self._lane = outer_lane
                return results
            answers = self._answer(requests)

    def _answer(self, requests: list[Any]) -> list[Any]:
        first = requests[0]
        if isinstance(first, Cond):
            return tf.cond(
                first.condition,
                lambda: self.run([request.if_true() for request in requests], self._lane),
                lambda: self.run([request.if_false() for request in requests], self._lane),
            )
        if isinstance(first, AllReduce):
            return self._all_reduce([request.tensors for request in requests], first.largest)
        move = self._all_gather if isinstance(first, AllGather) else self._all_to_all
        return move([request.tensor for request in requests])

    def cond(self, condition: tf.Tensor, if_true: Callable[[], None], if_false: Callable[[], None]) -> None:
        """Calls one of two functions, which may run collectives, in the graph of a step.

        Args:
            condition: A scalar, the same on all ranks.
            if_true: The function to call if `condition` is true.
            if_false: The function to call otherwise.
        """
        tf.cond(condition, if_true, if_false)

    @abc.abstractmethod
    def gather(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Returns, for each rank in this process, the concatenated rows of all ranks.

        All ranks have the same number of rows, which may change between steps.
        """

    @abc.abstractmethod
    def gather_rows(self, slices: list[tf.IndexedSlices], step: tf.Tensor) -> list[tf.IndexedSlices]:
        """Returns, for each rank in this process, the concatenated rows of all ranks. Their number may differ between ranks and between steps."""

    @abc.abstractmethod
    def add(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Returns, for each rank in this process, the sum over all ranks. All ranks have the same shape, which may change between steps."""

    @abc.abstractmethod
    def _all_reduce(self, tensors: list[Sequence[tf.Tensor]], largest: bool) -> list[list[tf.Tensor]]: ...

    @abc.abstractmethod
    def _all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]: ...

    @abc.abstractmethod
    def _all_to_all(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]: ...


def communicator_for(strategy: tf.distribute.Strategy) -> Communicator:
    """Returns the communicator of a strategy's replicas; creates it at the first call.

    Raises:
        ConfigError: The strategy does not support compression (`check_compresses`).
    """
    check_compresses(strategy)
    if getattr(strategy, "communicator", None) is None:  # strategies of TensorFlow have no such attribute
        with tf.init_scope():
            strategy.communicator = (
                CrossProcessCommunicator(strategy)
                if traits_of(strategy).several_processes
                else InProcessCommunicator(tf_internals.num_replicas(strategy))
            )
    return strategy.communicator


def check_compresses(strategy: tf.distribute.Strategy) -> None:
    """Checks that a strategy supports compression, and so has a communicator.

    Raises:
        ConfigError: It does not.
    """
    if not traits_of(strategy).compresses:
        raise ConfigError(
            f"compression is not possible under {type(strategy).__name__} (yet); use multi_worker_mirrored or mirrored."
        )


class InProcessCommunicator(Communicator):
    """Ranks that are all in this process: their collectives are ordinary operations."""

    def __init__(self, size: int):
        super().__init__(range(size), size)

    def _all_reduce(self, tensors: list[Sequence[tf.Tensor]], largest: bool) -> list[list[tf.Tensor]]:
        add = functools.partial(functools.reduce, tf.maximum) if largest else tf.add_n
        totals = [add(list(values)) for values in zip(*tensors, strict=True)]
        return [list(totals) for _ in self.ranks]

    def _all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.stack(tensors)] * self.size

    def _all_to_all(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.stack([tensor[rank] for tensor in tensors]) for rank in self.ranks]

    def gather(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        return [tf.concat(tensors, 0)] * self.size

    def gather_rows(self, slices: list[tf.IndexedSlices], step: tf.Tensor) -> list[tf.IndexedSlices]:
        values = tf.concat([s.values for s in slices], 0)
        indices = tf.concat([s.indices for s in slices], 0)
        return [tf.IndexedSlices(values, indices, slices[0].dense_shape)] * self.size

    def add(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        return [tf.add_n(tensors)] * self.size


class CrossProcessCommunicator(Communicator):
    """Ranks in several processes, which use TensorFlow's collectives: its ring, or NCCL.

    Args:
        strategy: The strategy of the ranks.
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
                # TensorFlow cannot split a tensor without elements into pieces.
                indices = [
                    i for i, value in enumerate(values) if value.dtype == dtype and value.shape.num_elements() != 0
                ]
                if not indices:
                    continue
                same = [values[index] for index in indices]
                total = self._launch(
                    tf_cluster.all_reduce,
                    launcher,
                    flatten(same) if len(same) > 1 else same[0],
                    merge_op="Max" if largest else "Add",
                    max_subdivs_per_device=_PIECES,
                )
                for index, value in zip(indices, unflatten(total, same) if len(same) > 1 else [total], strict=True):
                    totals[index] = value
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
        return [self._gather(launcher, tensor, step) for launcher, tensor in zip(self._launchers, tensors, strict=True)]

    def _gather(self, launcher: Launcher, tensor: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return self._launch(tf_cluster.all_gather, launcher, tensor, _key_of(step))

    def add(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        return [
            self._launch(tf_cluster.all_reduce, launcher, tensor, _key_of(step), merge_op="Add")
            for tensor, launcher in zip(tensors, self._launchers, strict=True)
        ]

    def gather_rows(self, slices: list[tf.IndexedSlices], step: tf.Tensor) -> list[tf.IndexedSlices]:
        results = []
        for local, launcher in zip(slices, self._launchers, strict=True):
            counts = self._gather(launcher, tf.shape(local.indices), step)
            most = tf.reduce_max(counts)
            padding = most - tf.shape(local.indices)[0]
            values = self._gather(launcher, tf.pad(local.values, [[0, padding], [0, 0]]), step)
            indices = self._gather(launcher, tf.pad(local.indices, [[0, padding]]), step)
            present = tf.reshape(tf.sequence_mask(counts, most), [-1])
            values = tf.ensure_shape(values, [None, local.values.shape[1]])
            indices = tf.ensure_shape(indices, [None])
            present = tf.ensure_shape(present, [None])
            results.append(
                tf.IndexedSlices(tf.boolean_mask(values, present), tf.boolean_mask(indices, present), local.dense_shape)
            )
        return results

    def _launch(self, collective: Any, launcher: Launcher, tensor: tf.Tensor, key: Any = 0, **how: Any) -> tf.Tensor:
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

    def _token(self, launcher: Launcher) -> tf.Tensor:
        """Returns the ordering token of the current lane. With TensorFlow's own token every collective would wait for every other one."""
        device = tf_cluster.device(launcher)
        if "GPU" in device:  # NCCL requires the same order on all ranks
            return tf_cluster.ordering_token(launcher)
        key = device, self._lane if self._lane < 0 else self._lane % _LANES
        if key not in self._tokens:
            with tf.init_scope(), tf.device(device):
                self._tokens[key] = tf_cluster.ResourceVariable(0.0)
        return self._tokens[key].handle


class ByteCounter(InProcessCommunicator):
    """Simulates one rank of a group of any size, and counts the bytes that it would send.

    Args:
        size: The number of ranks.

    Attributes:
        sent: Bytes sent by one rank. For a tensor of B bytes and N ranks, an all-reduce (a ring) sends 2 (N-1)/N B, an all-gather
            (N-1) B, and an all-to-all (N-1)/N B.
    """

    def __init__(self, size: int):
        super().__init__(size)
        self.ranks = [0]
        self.sent = 0.0

    def _answer(self, requests: list[Any]) -> list[Any]:
        if isinstance(requests[0], Cond):  # the branch of most steps: the other one is a warm-up
            return self.run([requests[0].if_false()], self._lane)
        return super()._answer(requests)

    def _all_reduce(self, tensors: list[Sequence[tf.Tensor]], largest: bool) -> list[list[tf.Tensor]]:
        self.sent += 2 * (self.size - 1) / self.size * sum(map(_byte_count, tensors[0]))
        return [list(tensors[0])]

    def _all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        self.sent += (self.size - 1) * _byte_count(tensors[0])
        return [tf.broadcast_to(tensors[0], [self.size, *tensors[0].shape])]

    def _all_to_all(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        self.sent += (self.size - 1) / self.size * _byte_count(tensors[0])
        return list(tensors)


def _key_of(step: tf.Tensor) -> tf.Tensor:
    """Returns the suffix of the key of a collective whose shape may differ between the steps of an execution.

    Within one execution TensorFlow treats collectives with equal keys as the same collective and expects the same shape. So TensorFlow's
    gather of rows fails if two steps of an execution have different numbers of rows.
    """
    return (tf.cast(step % _RESERVED_KEYS, tf.int32) + 1) * _KEYS


def _byte_count(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() * tensor.dtype.size
