"""A communicator that runs exchanges through a `BufferTransport`, called from TensorFlow's graph with the tensors' memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Function, Launcher
from tfdist.collectives.buffer_transport import BufferTransport
from tfdist.collectives.calls import Calls
from tfdist.collectives.communicator import CrossProcessCommunicator, Result
from tfdist.collectives.requests import Cond
from tfdist.compat import tf_cluster

_LAST = "tfdist_last_exchange"  # the graph collection with the last exchange, for which the next one waits
_GATE = (3,)  # a shape that no other collective has, so that TensorFlow raises if ranks run different collectives


class BufferedCommunicator(CrossProcessCommunicator):
    """Ranks in several processes, which exchange NumPy arrays.

    Arrays are sent in the order in which their exchanges were traced. That is the order in which backward completes the
    buckets, and it is equal on all processes.

    Args:
        ranks: The ranks in this process.
        size: The number of ranks in all processes.
        launcher: Launches the collectives of TensorFlow with which a step begins.
        transport: The transport of the arrays between the processes.
        timeout_seconds: How long an exchange may take; 0 means without limit.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        size: int,
        launcher: Launcher,
        transport: BufferTransport,
        timeout_seconds: float = 0,
    ):
        super().__init__(ranks, size, launcher)
        self.transport, self.calls = transport, Calls(timeout_seconds)

    def run(self, exchanges: Sequence[Generator[Any, Any, Result]], lane: int = 0) -> list[Result]:
        if lane:
            return super().run(exchanges, lane)
        with tf.control_dependencies([self._gate()]):  # all operations of the exchanges wait for the gate
            return super().run(exchanges, lane)

    def gather(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        with tf.control_dependencies([self._gate()]):
            return super().gather(tensors, step)

    def add(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        with tf.control_dependencies([self._gate()]):
            return super().add(tensors, step)

    def cond(self, condition: tf.Tensor, if_true: Callable[[], None], if_false: Callable[[], None]) -> None:
        def ended(branch: Callable[[], None]) -> tf.Tensor:
            branch()
            with tf.control_dependencies(_before()):
                return tf.constant(True)

        _in_turn(lambda: tf.cond(condition, lambda: ended(if_true), lambda: ended(if_false)))

    def _reduce_of_processes(self, tensor: tf.Tensor, largest: bool) -> tf.Tensor:
        def reduce(numbers: np.ndarray) -> np.ndarray:
            return self.transport.all_reduce(numbers, largest)

        (total,) = self._call("largest" if largest else "sum", reduce, tensor, [tensor.dtype])
        total.set_shape(tensor.shape)
        return total

    def _gather_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        (every,) = self._call("all_gather", self.transport.all_gather, tensor, [tensor.dtype])
        every.set_shape([self.processes, *tensor.shape])
        return every

    def _exchange_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        (rows,) = self._call("all_to_all", self.transport.all_to_all, tensor, [tensor.dtype])
        rows.set_shape(tensor.shape)
        return rows

    def _gather_rows_of_processes(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        def gather(own: np.ndarray) -> np.ndarray:
            return np.concatenate(self.transport.all_gather(own))

        (every,) = self._call("gather", gather, rows, [rows.dtype])
        every.set_shape([None, *rows.shape[1:]])
        return every

    def _add_changing_of_processes(self, tensor: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return self._reduce_of_processes(tensor, largest=False)

    def _gather_unequal_rows_of_processes(
        self, values: tf.Tensor, indices: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        width, types = values.shape[1], [values.dtype, indices.dtype]
        values, indices = self._call("rows", self._gather_unequal, [values, indices], types)
        values.set_shape([None, width])
        indices.set_shape([None])
        return values, indices

    def _gather_unequal(self, values: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = self.transport.all_gather(np.array(len(indices), np.int64))

        def gathered(rows: np.ndarray) -> np.ndarray:
            padded = np.zeros((counts.max(), *rows.shape[1:]), rows.dtype)
            padded[: len(rows)] = rows
            every = self.transport.all_gather(padded)
            return np.concatenate([part[:count] for part, count in zip(every, counts, strict=True)])

        return gathered(values), gathered(indices)

    def _gate(self) -> tf.Tensor:
        """Returns a tensor that becomes available once all ranks have reached the same point of the same step.

        The exchanges of a step start with this small TensorFlow collective, which detects a rank that runs a different collective,
        has no more data or has exited. It depends on no tensor of the step, so that it completes during the forward pass.
        """
        return self._launch(tf_cluster.all_reduce, tf.zeros(_GATE), merge_op="Add")

    def _call(self, kind: str, function: Function, arguments: Any, types: list[tf.DType]) -> list[tf.Tensor]:
        """Returns the results of a function of arrays, which runs after the exchange that was traced before it."""
        inputs = arguments if isinstance(arguments, list) else [arguments]

        def checked(*arrays: np.ndarray) -> Any:
            return self.calls(lambda: self._checked(kind, function, arrays))

        def call() -> list[tf.Tensor]:
            with tf.device("CPU:0"):
                results = tf.numpy_function(checked, inputs, types)
            return list(results) if isinstance(results, (list, tuple)) else [results]

        return _in_turn(call)

    def _answer(self, requests: list[Any]) -> list[Any]:
        if not isinstance(first := requests[0], Cond):
            return super()._answer(requests)

        def ended(branches: Sequence[Callable[[], Any]]) -> Any:
            # A nonzero lane: no gate within a condition.
            results = self.run([branch() for branch in branches], self._lane or 1)
            with tf.control_dependencies(_before()):
                return tf.nest.map_structure(tf.identity, results)

        return _in_turn(
            lambda: tf.cond(
                first.condition,
                lambda: ended([request.if_true for request in requests]),
                lambda: ended([request.if_false for request in requests]),
            )
        )

    def _checked(self, kind: str, function: Function, arrays: Sequence[np.ndarray]) -> Any:
        """Calls a function of arrays if all ranks make the same call; otherwise raises, as a library might wait forever."""
        shapes = [array.shape[1:] if kind == "rows" else array.shape for array in arrays]
        text = f"{kind} of {[array.dtype.name for array in arrays]} {shapes}"
        number = zlib.crc32(text.encode())
        both = self.transport.all_reduce(np.array([number, -number], np.int64), largest=True)
        if both[0] != -both[1]:
            raise ValueError(f"Shape mismatch in the collective instance: not all ranks ask for a {text}.")
        return function(*arrays)


def _in_turn(make: Callable[[], Any]) -> Any:
    """Returns the result of `make`, whose operations wait for the exchange made before in the same graph.

    TensorFlow itself orders operations with side effects, but not conditions that read variables.
    """
    if tf.executing_eagerly():
        return make()
    with tf.control_dependencies(_before()):
        result = make()
    graph = tf.compat.v1.get_default_graph()
    graph.get_collection_ref(_LAST)[:] = [tf.nest.flatten(result)[0]]
    return result


def _before() -> list[tf.Tensor]:
    graph = tf.compat.v1.get_default_graph()  # a new graph starts with a copy of its outer graph's collections
    return [] if tf.executing_eagerly() else [op for op in graph.get_collection(_LAST) if op.graph is graph]
