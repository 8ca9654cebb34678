"""A communicator that runs exchanges through a `BufferTransport`, called from TensorFlow's graph with the tensors' memory."""

from __future__ import annotations

import contextlib
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

_TOKEN = "tfdist_exchange_token"  # the graph collection with the token that the last exchange returned
_GATE = (3,)  # a shape that no other collective has, so that TensorFlow raises if ranks run different collectives


class BufferedCommunicator(CrossProcessCommunicator):
    """Ranks in several processes, which exchange NumPy arrays.

    Arrays are sent in the order in which their exchanges were traced. That is the order in which backward completes the
    buckets, and it is equal on all processes. `launcher` launches TensorFlow's collectives. An exchange may take `timeout_seconds`; 0 means no
    limit.
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
        self.transport = transport
        self.calls = Calls(timeout_seconds)

    def run(self, exchanges: Sequence[Generator[Any, Any, Result]], lane: int = 0) -> list[Result]:
        with self._gated(lane):
            return super().run(exchanges, lane)

    def _in_lane(self, lane: int, work: Callable[[], Any]) -> Any:
        with self._gated(lane):
            return super()._in_lane(lane, work)

    def cond(self, condition: tf.Tensor, if_true: Callable[[], None], if_false: Callable[[], None]) -> None:
        def ended(branch: Callable[[], None]) -> tf.Tensor:
            branch()
            return tf.constant(True)

        _cond(condition, lambda: ended(if_true), lambda: ended(if_false))

    def _reduce_of_processes(self, tensor: tf.Tensor, largest: bool) -> tf.Tensor:
        def reduce(numbers: np.ndarray) -> np.ndarray:
            return self.transport.all_reduce(numbers, largest)

        (total,) = self._call("largest" if largest else "sum", reduce, tensor)
        total.set_shape(tensor.shape)
        return total

    def _gather_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        (every,) = self._call("all_gather", self.transport.all_gather, tensor)
        every.set_shape([self.processes, *tensor.shape])
        return every

    def _exchange_of_processes(self, tensor: tf.Tensor) -> tf.Tensor:
        (rows,) = self._call("all_to_all", self.transport.all_to_all, tensor)
        rows.set_shape(tensor.shape)
        return rows

    def _reduce_scatter_of_processes(self, rows: tf.Tensor) -> tf.Tensor:
        (total,) = self._call("reduce_scatter", self.transport.reduce_scatter, rows)
        total.set_shape(rows.shape[1:])
        return total

    def _gather_rows_of_processes(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        def gather(own: np.ndarray) -> np.ndarray:
            return np.concatenate(self.transport.all_gather(own))

        (every,) = self._call("gather", gather, rows)
        every.set_shape([None, *rows.shape[1:]])
        return every

    def _exchange_changing_of_processes(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return self._exchange_of_processes(rows)

    def _add_changing_of_processes(self, tensor: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return self._reduce_of_processes(tensor, largest=False)

    def _gather_unequal_rows_of_processes(
        self, values: tf.Tensor, indices: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        all_values, all_indices = self._call("rows", self._gather_unequal, values, indices)
        all_values.set_shape([None, values.shape[1]])
        all_indices.set_shape([None])
        return all_values, all_indices

    def _gather_unequal(self, values: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = self.transport.all_gather(np.array(len(indices), np.int64))

        def gathered(rows: np.ndarray) -> np.ndarray:
            padded = np.zeros((counts.max(), *rows.shape[1:]), rows.dtype)
            padded[: len(rows)] = rows
            every = self.transport.all_gather(padded)
            return np.concatenate([part[:count] for part, count in zip(every, counts, strict=True)])

        return gathered(values), gathered(indices)

    def _gated(self, lane: int) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of exchanges that wait until all ranks have reached the same point of the same step.

        The exchanges of a step start with a small TensorFlow collective if the transport would wait forever for a rank that runs a
        different one, has no more data or has exited. It depends on no tensor of the step, so that it completes during the forward pass;
        but it takes two to three messages in turn. A transport that checks its calls needs none.
        """
        if lane or self.transport.checks_calls:
            return contextlib.nullcontext()
        gate = self._launch(tf_cluster.all_reduce, tf.zeros(_GATE), merge_op="Add")
        context: contextlib.AbstractContextManager[Any] = tf.control_dependencies([gate])
        return context

    def _call(self, kind: str, function: Function, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Calls a function with the tensors' arrays, after the exchange that was traced before it. Its results have the tensors' dtypes."""

        def checked(token: np.ndarray, *arrays: np.ndarray) -> list[Any]:
            results = self.calls(lambda: self._checked(kind, function, arrays))
            return [np.int32(0), *(results if isinstance(results, tuple) else [results])]

        with tf.device("CPU:0"):
            token, *results = tf.numpy_function(
                checked, [_token(), *tensors], [tf.int32, *(tensor.dtype for tensor in tensors)]
            )
        _keep(token)
        return results

    def _answer(self, requests: list[Any]) -> list[Any]:
        first = requests[0]
        if not isinstance(first, Cond):
            return super()._answer(requests)
        lane = self._lane or 1  # a nonzero lane: no gate within a condition
        return _cond(
            first.condition,
            lambda: self.run([request.if_true() for request in requests], lane),
            lambda: self.run([request.if_false() for request in requests], lane),
        )

    def _checked(self, kind: str, function: Function, arrays: Sequence[np.ndarray]) -> Any:
        """Calls a function of arrays if all ranks make the same call; otherwise raises, as a library might wait forever."""
        if self.transport.checks_calls:
            return function(*arrays)
        shapes = [array.shape for array in arrays]
        if kind == "rows":  # whose number may differ between ranks
            shapes = [shape[1:] for shape in shapes]
        text = f"{kind} of {[array.dtype.name for array in arrays]} {shapes}"
        number = zlib.crc32(text.encode())
        # The largest number and the smallest in one sum: they are equal if all ranks have the same number.
        both = self.transport.all_reduce(np.array([number, -number], np.int64), largest=True)
        if both[0] != -both[1]:
            raise ValueError(f"Shape mismatch in the collective instance: not all ranks ask for a {text}.")
        return function(*arrays)


def _cond(condition: tf.Tensor, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """Returns the result of `tf.cond`. Exchanges in its branches have their turn among those around it."""
    before = _token()

    def in_turn(branch: Callable[[], Any]) -> tuple[tf.Tensor, Any]:
        _keep(tf.identity(before))
        result = branch()
        return _token(), result

    token, result = tf.cond(condition, lambda: in_turn(if_true), lambda: in_turn(if_false))
    _keep(token)
    return result


def _token() -> tf.Tensor:
    """Returns the token that the next exchange takes as an input, so that it waits for the exchange traced before it in the same graph.

    Grappler has removed control dependencies between exchanges; it keeps inputs.
    """
    if tf.executing_eagerly():
        return tf.zeros([], tf.int32)
    graph = tf.compat.v1.get_default_graph()
    # A new graph starts with a copy of its outer graph's collections.
    kept = [token for token in graph.get_collection(_TOKEN) if token.graph is graph]
    return kept[0] if kept else tf.zeros([], tf.int32)


def _keep(token: tf.Tensor) -> None:
    """Makes a token the input of the next exchange."""
    if not tf.executing_eagerly():
        tf.compat.v1.get_default_graph().get_collection_ref(_TOKEN)[:] = [token]
