"""Executes the collectives that exchanges request (see `requests.py`), within a process and between processes."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.aliases import Launcher
from tfdist.collectives import hardware
from tfdist.collectives.requests import AllGather, AllReduce, Cond, RankContext, flatten, unflatten
from tfdist.collectives.tree import fold
from tfdist.compat import tf_cluster, tf_internals
from tfdist.config import relations
from tfdist.config.strategy_traits import traits_of
from tfdist.runtime.report.phase import main as phases

Result = TypeVar("Result")
_PIECES = 8  # maximum number of pieces (of about 4 MB) of a rank's part of a sum: a rank adds one piece while it receives the next
_SMALL_BYTES = 2**15  # up to this size each process sums the entire tensor: one collective instead of two
_LANES = 16  # maximum number of lanes, because each running collective occupies a thread
_KEYS = 2**20  # exceeds the number of collectives in a step
_RESERVED_KEYS = 1000  # exceeds the number of steps in an execution


class Communicator(abc.ABC):
    """Runs the exchanges of this process's ranks, with all ranks of the group. A rank is a replica.

    Subclasses define the methods that end in `_of_processes`. Each process first combines the tensors of its ranks and then exchanges one result, so the bytes of a sum do not grow
    with the number of ranks in a process. Sums over ranks have the order of `tree`.

    `ranks` are the ranks in this process: consecutive numbers, equally many in each process. `devices` are their GPUs, on which TensorFlow
    otherwise places all operations on the first; empty for CPUs.
    """

    def __init__(self, ranks: Sequence[int], size: int, devices: Sequence[str] = ()):
        self.ranks = list(ranks)
        self._devices = devices
        self.size = size
        self._lane = 0

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.size // len(self.ranks)

    def contexts(self, step: tf.Tensor) -> list[RankContext]:
        """Returns the context of each rank in this process."""
        return [RankContext(rank, self.size, step) for rank in self.ranks]

    def run(self, exchanges: Sequence[Generator[Any, Any, Result]], lane: int = 0) -> list[Result]:
        """Runs the exchanges of this process's ranks to their end; returns their results. Different lanes (modulo 16) run concurrently."""
        outer_lane = self._lane
        self._lane = lane
        answers: list[Any] = [None] * len(exchanges)
        # All ranks run the same generator, so in a round either each of them requests the same collective, or each returns.
        while True:
            requests = []
            results = []
            for number, (exchange, answer) in enumerate(zip(exchanges, answers, strict=True)):
                try:
                    with self._on_device(number):
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
            return self.all_reduce([request.tensors for request in requests], first.largest)
        move = self._all_gather if isinstance(first, AllGather) else self._all_to_all
        return move([request.tensor for request in requests])

    def cond(self, condition: tf.Tensor, if_true: Callable[[], None], if_false: Callable[[], None]) -> None:
        """Calls one of two functions, which may run collectives, in the graph of a step. The condition is equal on all ranks."""
        tf.cond(condition, if_true, if_false)

    def gather(self, tensors: list[tf.Tensor], step: tf.Tensor, lane: int = 0) -> list[tf.Tensor]:
        """Returns, for each rank in this process, the concatenated rows of all ranks. All ranks have equally many; the number may change between steps."""
        rows = _concat(tensors)
        return [self._in_lane(lane, lambda: self._gather_rows_of_processes(rows, step))] * len(tensors)

    def gather_rows(self, slices: list[tf.IndexedSlices], step: tf.Tensor) -> list[tf.IndexedSlices]:
        """Returns, for each rank in this process, the concatenated rows of all ranks. Their number may differ between ranks and between steps."""
        local_values = _concat([s.values for s in slices])
        local_indices = _concat([s.indices for s in slices])
        values, indices = self._gather_unequal_rows_of_processes(local_values, local_indices, step)
        return [tf.IndexedSlices(values, indices, slices[0].dense_shape)] * len(slices)

    def add(self, tensors: list[tf.Tensor], step: tf.Tensor, lane: int = 0) -> list[tf.Tensor]:
        """Returns, for each rank in this process, the sum over all ranks. All ranks have the same shape, which may change between steps."""
        total = tree_sum(tensors)
        return [self._in_lane(lane, lambda: self._add_changing_of_processes(total, step))] * len(tensors)

    def exchange(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Sends row p of a tensor `[processes, ...]` to process p; returns the rows that this process receives, by sender.

        All processes have the same shape, which may change between steps.
        """
        return self._in_lane(0, lambda: self._exchange_changing_of_processes(rows, step))

    def all_reduce(self, tensors: Sequence[Sequence[tf.Tensor]], largest: bool = False) -> list[list[tf.Tensor]]:
        """Returns the sums (if `largest`, the maxima) over all ranks, for each rank in this process: `[ranks][tensors]`, as `tensors`."""
        join = functools.partial(functools.reduce, tf.maximum) if largest else tree_sum
        totals = []
        for number, values in enumerate(zip(*tensors, strict=True)):
            with self._on_device(number + self._lane):  # in turn
                totals.append(join(values))
        if self.processes > 1:
            totals = self._reduce_packed(totals, largest)
        return [list(totals) for _ in tensors]

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], lane: int = 0) -> tf.Tensor:
        """Returns this process's part of the sum over all ranks, in the order of `tree`.

        `tensors` are the vectors of this process's ranks. The sum has as many parts of equal length as there are processes.
        """
        rows = tf.reshape(tree_sum(tensors), [self.processes, -1])
        return self._in_lane(lane, lambda: self._reduce_scatter_of_processes(rows))

    def gather_parts(self, part: tf.Tensor, lane: int = 0) -> tf.Tensor:
        """Returns the concatenated parts of all processes, vectors of equal length, as `reduce_scatter` returns them."""
        return self._in_lane(lane, lambda: tf.reshape(self._gather_of_processes(part), [-1]))

    def _on_device(self, number: int) -> contextlib.AbstractContextManager[Any]:
        return tf.device(self._devices[number % len(self._devices)]) if self._devices else contextlib.nullcontext()

    def _in_lane(self, lane: int, work: Callable[[], Any]) -> Any:
        outer_lane = self._lane
        self._lane = lane
        try:
            return work()
        finally:
            self._lane = outer_lane

    def _reduce_packed(self, values: list[tf.Tensor], largest: bool) -> list[tf.Tensor]:
        """Returns the sums over processes. The tensors of one dtype share a message; a tensor of unknown size has its own."""
        totals = list(values)
        indices_of_dtype: dict[tf.DType, list[int]] = {}
        for index, value in enumerate(values):
            elements = value.shape.num_elements()
            if elements is None:
                totals[index] = self._reduce_of_processes(value, largest)
            elif elements:  # TensorFlow cannot split a tensor without elements into pieces
                indices_of_dtype.setdefault(value.dtype, []).append(index)
        for indices in indices_of_dtype.values():
            packed = [values[index] for index in indices]
            total = self._reduce_of_processes(flatten(packed), largest)
            for index, value in zip(indices, unflatten(total, packed), strict=True):
                totals[index] = value
        return totals

    def _all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        gathered = tf.stack(tensors)
        if self.processes > 1:
            gathered = tf.reshape(self._gather_of_processes(gathered), [self.size, *tensors[0].shape])
        return [gathered] * len(tensors)

    def _all_to_all(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if self.processes == self.size:
            return [self._exchange_of_processes(tensors[0])]
        local = len(tensors)
        shape = tensors[0].shape[1:]
        rows = tf.stack(tensors, 1)  # [to, from, ...], the senders of this process
        if self.processes > 1:
            # Process p receives the rows for all of its ranks in one message. Afterwards the axes are [process, to, from, ...].
            rows = self._exchange_of_processes(tf.reshape(rows, [self.processes, local, local, *shape]))
            rows = tf.transpose(rows, [1, 0, 2, *range(3, rows.shape.rank)])
            rows = tf.reshape(rows, [local, self.size, *shape])
        return tf.unstack(rows)

    @abc.abstractmethod
    def _reduce_of_processes(self, tensor: tf.Tensor, largest: bool) -> tf.Tensor:
        """Returns the sum (or maximum) of a tensor over the processes."""

    @abc.abstractmethod
    def _gather_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensors of all processes, `[processes, *shape]`."""

    @abc.abstractmethod
    def _exchange_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sends row p of a tensor `[processes, ...]` to process p; returns the rows that this process receives."""

    def _reduce_scatter_of_processes(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns row p of the sum of `[processes, elements]` over the processes, on process p."""
        return tree_sum(tf.unstack(self._exchange_of_processes(rows)))

    @abc.abstractmethod
    def _gather_rows_of_processes(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Returns the concatenated rows of all processes, which have equally many."""

    @abc.abstractmethod
    def _gather_unequal_rows_of_processes(
        self, values: tf.Tensor, indices: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the concatenated rows and indices of all processes, which may have different numbers of them."""

    @abc.abstractmethod
    def _add_changing_of_processes(self, tensor: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the processes of a tensor whose shape may change between steps."""

    @abc.abstractmethod
    def _exchange_changing_of_processes(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Is `_exchange_of_processes` for a tensor whose shape may change between steps."""


def communicator_for(strategy: tf.distribute.Strategy) -> Communicator:
    """Returns the communicator of a strategy's replicas; creates it at the first call.

    Raises:
        ConfigError: The strategy does not support compression (`check_compresses`).
    """
    check_compresses(strategy)
    if getattr(strategy, "communicator", None) is None:  # strategies of TensorFlow have no such attribute
        with tf.init_scope():
            if traits_of(strategy).several_processes:
                strategy.communicator = cross_process_communicator(strategy)
            else:
                devices = strategy.extended.worker_devices if hardware.on_gpus(strategy) else ()
                strategy.communicator = InProcessCommunicator(tf_internals.num_replicas(strategy), devices)
    return strategy.communicator


def check_compresses(strategy: tf.distribute.Strategy) -> None:
    """Checks that a strategy supports compression, and so has a communicator.

    Raises:
        ConfigError: The strategy does not support compression.
    """
    if not traits_of(strategy).compresses:
        relations.check({"compression": "", "not_compressing": type(strategy).__name__})


class InProcessCommunicator(Communicator):
    """Ranks that are all in this process: their collectives are ordinary operations."""

    def __init__(self, size: int, devices: Sequence[str] = ()):
        super().__init__(range(size), size, devices)

    def _reduce_of_processes(self, tensor: tf.Tensor, largest: bool) -> tf.Tensor:
        return tensor

    def _gather_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor[tf.newaxis]

    def _exchange_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor

    def _gather_rows_of_processes(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return rows

    def _gather_unequal_rows_of_processes(
        self, values: tf.Tensor, indices: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return values, indices

    def _add_changing_of_processes(self, tensor: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return tensor

    def _exchange_changing_of_processes(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return rows


class CrossProcessCommunicator(Communicator):
    """Ranks in several processes, which use TensorFlow's collectives.

    On CPUs sums have the order of `tree`. On GPUs (`on_gpu`) NCCL adds in its own order, and all collectives run one after the other.
    """

    def __init__(self, ranks: Sequence[int], size: int, launcher: Launcher, on_gpu: bool = False):
        super().__init__(ranks, size)
        self._launcher = launcher
        self._on_gpu = on_gpu
        self._tokens: dict[int, Any] = {}  # by lane

    def _reduce_of_processes(self, tensor: tf.Tensor, largest: bool) -> tf.Tensor:
        if largest or self._adds_in_one_call(tensor.dtype):
            merge_op = "Max" if largest else "Add"
            return self._launch(tf_cluster.all_reduce, tensor, merge_op=merge_op, max_subdivs_per_device=_PIECES)
        vector = tf.reshape(tensor, [-1])
        count = tensor.shape.num_elements()
        if count is None:
            total = tree_sum(tf.unstack(self._gather_of_processes(vector)))
            return tf.reshape(total, tf.shape(tensor))
        if count * tensor.dtype.size <= _SMALL_BYTES:
            total = tree_sum(tf.unstack(self._gather_of_processes(vector)))
        else:
            # Each process sums one part of the vector, and sends the sum to all: as many bytes as the ring moves.
            padding = -count % self.processes
            if padding:
                vector = tf.pad(vector, [[0, padding]])
            parts = tf.reshape(vector, [self.processes, -1])
            local_part = tree_sum(tf.unstack(self._exchange_of_processes(parts)))
            total = tf.reshape(self._gather_of_processes(local_part), [-1])[:count]
        return tf.reshape(total, tensor.shape)

    def _adds_in_one_call(self, dtype: tf.DType) -> bool:
        """Returns whether an all-reduce of TensorFlow adds as tfdist promises."""
        if not dtype.is_floating:
            return True
        if self._on_gpu:
            return bool(dtype != tf.bfloat16)  # TensorFlow's list of NCCL's types lacks it (core/nccl/nccl_manager.cc)
        # The order does not matter for two numbers. TensorFlow's ring adds more numbers in an order that depends on their position in
        # the tensor.
        return self.processes == 2

    def _gather_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        gathered = self._launch(tf_cluster.all_gather, tensor[tf.newaxis])
        return tf.ensure_shape(gathered, [self.processes, *tensor.shape])

    def _exchange_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._launch(tf_cluster.all_to_all, tensor)

    def _exchange_changing_of_processes(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(self._launch(tf_cluster.all_to_all, rows, _key_of(step)), rows.shape)

    def _gather_rows_of_processes(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return self._launch(tf_cluster.all_gather, rows, _key_of(step))

    def _add_changing_of_processes(self, tensor: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        if self._adds_in_one_call(tensor.dtype):
            return self._launch(tf_cluster.all_reduce, tensor, _key_of(step), merge_op="Add")
        gathered = self._launch(tf_cluster.all_gather, tensor[tf.newaxis], _key_of(step))
        return tree_sum([gathered[process] for process in range(self.processes)])

    def _gather_unequal_rows_of_processes(
        self, values: tf.Tensor, indices: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        # TensorFlow gathers equally many rows of each process: pad to the most, and remove the padding of all processes afterwards.
        width = values.shape[1]
        rows = tf.shape(indices)
        counts = self._gather_rows_of_processes(rows, step)
        max_rows = tf.reduce_max(counts)
        padding = max_rows - rows[0]
        values = self._gather_rows_of_processes(tf.pad(values, [[0, padding], [0, 0]]), step)
        indices = self._gather_rows_of_processes(tf.pad(indices, [[0, padding]]), step)
        values = tf.ensure_shape(values, [None, width])
        indices = tf.ensure_shape(indices, [None])
        present = tf.ensure_shape(tf.reshape(tf.sequence_mask(counts, max_rows), [-1]), [None])
        return tf.boolean_mask(values, present), tf.boolean_mask(indices, present)

    def _launch(self, collective: Any, tensor: tf.Tensor, key: Any = 0, **how: Any) -> tf.Tensor:
        # TensorFlow cannot gather bfloat16, and NCCL's types lack it.
        if collective is not tf_cluster.all_reduce and tensor.dtype == tf.bfloat16:
            return tf.bitcast(self._launch(collective, tf.bitcast(tensor, tf.float16), key, **how), tf.bfloat16)
        options = tf_cluster.options(self._launcher)
        # Where a thread watches the waits, it alone decides when a wait is too long.
        timeout = 0 if phases.watched else options.timeout_seconds
        with tf.device(tf_cluster.device(self._launcher)):
            return collective(
                tensor,
                *tf_cluster.group(self._launcher),
                tf_cluster.next_key(self._launcher) + key,
                communication_hint=options.implementation.value,
                timeout=timeout or 0,
                ordering_token=self._token(),
                **how,
            )

    def _token(self) -> tf.Tensor:
        """Returns the ordering token of the current lane. With TensorFlow's own token every collective would wait for every other one."""
        if self._on_gpu:  # NCCL wants the same order on all ranks
            return tf_cluster.ordering_token(self._launcher)
        lane = self._lane if self._lane < 0 else self._lane % _LANES
        if lane not in self._tokens:
            with tf.init_scope(), tf.device(tf_cluster.device(self._launcher)):
                self._tokens[lane] = tf_cluster.ResourceVariable(0.0)
        return self._tokens[lane].handle


class DeviceCommunicator(CrossProcessCommunicator):
    """Ranks on several GPUs of each worker. Each rank takes part in the collectives itself: NCCL chooses the fastest route between GPUs.

    Messages of processes, as opposed to those of ranks, travel between their CPUs.
    """

    def __init__(self, strategy: tf.distribute.MultiWorkerMirroredStrategy):
        ranks = _ranks(strategy)
        size = tf_internals.num_replicas(strategy)
        super().__init__(ranks, size, tf_cluster.process_launcher(strategy))
        self._devices = strategy.extended.worker_devices
        self._communicators = [
            CrossProcessCommunicator([rank], size, launcher, on_gpu=True)
            for rank, launcher in zip(ranks, tf_cluster.launchers(strategy), strict=True)
        ]

    def _answer(self, requests: list[Any]) -> list[Any]:
        if isinstance(requests[0], Cond):
            return super()._answer(requests)
        return self._on_each_rank(CrossProcessCommunicator._answer, requests)

    def gather(self, tensors: list[tf.Tensor], step: tf.Tensor, lane: int = 0) -> list[tf.Tensor]:
        return self._on_each_rank(CrossProcessCommunicator.gather, tensors, step)

    def gather_rows(self, slices: list[tf.IndexedSlices], step: tf.Tensor) -> list[tf.IndexedSlices]:
        return self._on_each_rank(CrossProcessCommunicator.gather_rows, slices, step)

    def add(self, tensors: list[tf.Tensor], step: tf.Tensor, lane: int = 0) -> list[tf.Tensor]:
        return self._on_each_rank(CrossProcessCommunicator.add, tensors, step)

    def all_reduce(self, tensors: Sequence[Sequence[tf.Tensor]], largest: bool = False) -> list[list[tf.Tensor]]:
        return self._on_each_rank(CrossProcessCommunicator.all_reduce, tensors, largest)

    def _on_each_rank(self, method: Callable[..., list[Any]], values: Sequence[Any], *others: Any) -> list[Any]:
        def call(number: int) -> Any:
            with self._on_device(number):
                return method(self._communicators[number], [values[number]], *others)[0]

        numbers = range(len(self.ranks))
        if not tf.executing_eagerly():
            return list(map(call, numbers))
        # A collective returns once all ranks take part in it, so each rank needs a thread.
        with futures.ThreadPoolExecutor(len(numbers)) as threads:
            return list(threads.map(call, numbers))


class ByteCounter(InProcessCommunicator):
    """Simulates one rank of a group of any size, and counts the bytes that it would send.

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

    def _reduce_of_processes(self, tensor: tf.Tensor, largest: bool) -> tf.Tensor:
        self.sent += 2 * (self.size - 1) / self.size * _byte_count(tensor)
        return tensor

    def _gather_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        self.sent += (self.size - 1) * _byte_count(tensor)
        return tf.broadcast_to(tensor, [self.size, *tensor.shape])

    def _exchange_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        self.sent += (self.size - 1) / self.size * _byte_count(tensor)
        return tensor


def cross_process_communicator(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> Communicator:
    """Returns the communicator of a strategy's replicas that uses TensorFlow's collectives."""
    on_gpu = hardware.on_gpus(strategy)
    if on_gpu and len(strategy.extended.worker_devices) > 1:
        return DeviceCommunicator(strategy)
    launcher = tf_cluster.launchers(strategy)[0] if on_gpu else tf_cluster.process_launcher(strategy)
    return CrossProcessCommunicator(_ranks(strategy), tf_internals.num_replicas(strategy), launcher, on_gpu)


def _ranks(strategy: tf.distribute.Strategy) -> list[int]:
    ids = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    return [int(number) for number in strategy.experimental_local_results(ids)]


def _concat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)


def tree_sum(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the sum of tensors of one shape, in the order of `tree`."""
    return fold(values, _add)


def _add(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    total = tf.add(left, right)
    # Grappler rewrites nested additions to one AddN, which adds from left to right. A Snapshot prevents that, and copies nothing.
    return total if tf.executing_eagerly() else tf.raw_ops.Snapshot(input=total)


def _key_of(step: tf.Tensor) -> tf.Tensor:
    """Returns the number to add to the key of a collective whose shape may differ between the steps of an execution.

    Within one execution TensorFlow treats collectives with equal keys as the same collective and expects the same shape. So TensorFlow's
    gather of rows fails if two steps of an execution have different numbers of rows.
    """
    return (tf.cast(step % _RESERVED_KEYS, tf.int32) + 1) * _KEYS


def _byte_count(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() * tensor.dtype.size
