"""A communicator that runs exchanges through a `BufferTransport`, called from TensorFlow's graph with the tensors' memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import Function
from tfdist.collectives.buffer_transport import BufferTransport
from tfdist.collectives.calls import Calls
from tfdist.collectives.communicator import CrossProcessCommunicator, Result
from tfdist.collectives.requests import Cond, flatten, unflatten
from tfdist.compat import tf_cluster

_LAST = "tfdist_last_exchange"  # the graph collection with the last exchange, for which the next one waits
_GATE = (3,)  # a shape that no other collective has, so that TensorFlow raises if ranks run different collectives


class BufferedCommunicator(CrossProcessCommunicator):
    """Ranks in several processes, one per process, which exchange NumPy arrays.

    Arrays are sent in the order in which their exchanges were traced. That is the order in which backward completes the
    buckets, and it is equal on all ranks.

    Args:
        strategy: The strategy of the ranks.
        transport: The transport of the arrays.
        timeout_seconds: How long an exchange may take; 0 means without limit.
    """

    def __init__(
        self,
        strategy: tf.distribute.MultiWorkerMirroredStrategy,
        transport: BufferTransport,
        timeout_seconds: float = 0,
    ):
        super().__init__(strategy)
        self.transport, self.calls = transport, Calls(timeout_seconds)

    def run(self, exchanges: Sequence[Generator[Any, Any, Result]], lane: int = 0) -> list[Result]:
        if lane:
            return super().run(exchanges, lane)
        with tf.control_dependencies([self._gate()]):  # all operations of the exchanges wait for the gate
            return super().run(exchanges, lane)

    def gather(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        with tf.control_dependencies([self._gate()]):
            (every,) = self._call("gather", self._gather_all, tensors[0], [tensors[0].dtype])
        every.set_shape([None, *tensors[0].shape[1:]])
        return [every]

    def add(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        with tf.control_dependencies([self._gate()]):
            (total,) = self._call("sum", self.transport.all_reduce, tensors[0], [tensors[0].dtype])
        total.set_shape(tensors[0].shape)
        return [total]

    def cond(self, condition: tf.Tensor, if_true: Callable[[], None], if_false: Callable[[], None]) -> None:
        def ended(branch: Callable[[], None]) -> tf.Tensor:
            branch()
            with tf.control_dependencies(_before()):
                return tf.constant(True)

        _in_turn(lambda: tf.cond(condition, lambda: ended(if_true), lambda: ended(if_false)))

    def _gather_all(self, rows: np.ndarray) -> np.ndarray:
        return np.concatenate(self.transport.all_gather(rows))

    def gather_rows(self, slices: list[tf.IndexedSlices], step: tf.Tensor) -> list[tf.IndexedSlices]:
        (local,) = slices
        values, indices = self._call(
            "rows", self._gather_rows, [local.values, local.indices], [local.values.dtype, local.indices.dtype]
        )
        values.set_shape([None, local.values.shape[1]])
        indices.set_shape([None])
        return [tf.IndexedSlices(values, indices, local.dense_shape)]

    def _gather_rows(self, values: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = self.transport.all_gather(np.array(len(indices), np.int64))

        def gathered(rows: np.ndarray) -> np.ndarray:
            padded = np.zeros((counts.max(), *rows.shape[1:]), rows.dtype)
            padded[: len(rows)] = rows
            every = self.transport.all_gather(padded)
            return np.concatenate([part[:count] for part, count in zip(every, counts, strict=True)])

        return gathered(values), gathered(indices)

    def _all_reduce(self, tensors: list[Sequence[tf.Tensor]], largest: bool) -> list[list[tf.Tensor]]:
        (values,) = tensors
        totals = list(values)

        def reduce(numbers: np.ndarray) -> np.ndarray:
            return self.transport.all_reduce(numbers, largest)

        for dtype in dict.fromkeys(value.dtype for value in values):
            indices = [i for i, value in enumerate(values) if value.dtype == dtype and value.shape.num_elements() != 0]
            if not indices:
                continue
            same = [values[index] for index in indices]
            numbers = flatten(same) if len(same) > 1 else same[0]  # a large gradient travels alone, without a copy
            (total,) = self._call("largest" if largest else "sum", reduce, numbers, [dtype])
            total.set_shape(numbers.shape)
            for index, value in zip(indices, unflatten(total, same) if len(same) > 1 else [total], strict=True):
                totals[index] = value
        return [totals]

    def _all_gather(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        (every,) = self._call("all_gather", self.transport.all_gather, tensors[0], [tensors[0].dtype])
        every.set_shape([self.size, *tensors[0].shape])
        return [every]

    def _all_to_all(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        (rows,) = self._call("all_to_all", self.transport.all_to_all, tensors[0], [tensors[0].dtype])
        rows.set_shape(tensors[0].shape)
        return [rows]

    def _gate(self) -> tf.Tensor:
        """Returns a tensor that becomes available once all ranks have reached the same point of the same step.

        The exchanges of a step start with this small TensorFlow collective, which detects a rank that runs a different collective,
        has no more data or has exited. It depends on no tensor of the step, so that it completes during the forward pass.
        """
        return self._launch(tf_cluster.all_reduce, self._launchers[0], tf.zeros(_GATE), merge_op="Add")

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
        (request,) = requests

        def ended(branch: Callable[[], Any]) -> Any:
            results = self.run([branch()], self._lane or 1)  # a nonzero lane: no gate within a condition
            with tf.control_dependencies(_before()):
                return tf.nest.map_structure(tf.identity, results)

        return _in_turn(
            lambda: tf.cond(first.condition, lambda: ended(request.if_true), lambda: ended(request.if_false))
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
