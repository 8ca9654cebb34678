"""Data that workers create themselves, by a function `(tf.distribute.InputContext) -> tf.data.Dataset`."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.aliases import DataIterator, Structure
from tfdist.compat import tf_internals
from tfdist.data import sent_arrays
from tfdist.errors import ConfigError
from tfdist.parameter_server.scheduler import InFlight, Scheduler
from tfdist.parameter_server.worker_step import TracedStep, WorkerStep

_PYTHON = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
_OUTSIDE = (
    "The dataset function runs on the workers, but uses {} that exists only on the chief: create it inside the "
    "function, or give Trainer.fit the data themselves, which the chief then reads and sends."
)

_TOO_LARGE = (
    "The dataset function makes tensors of 2 GB and more out of arrays, which do not fit into a TensorFlow graph: let it read files, "
    "such as TFRecords, which the workers can open, or give the arrays themselves to tfdist.data.epochs or from_tensor_slices."
)


def _bytes(constant: tf.Operation) -> int:
    tensor = constant.outputs[0]
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size


class WorkerDataset:
    """The pipelines of a dataset function, which is traced on the chief and runs on workers; each worker has its own pipeline.

    Raises ConfigError if the function does not return a dataset, calls Python, or uses objects on the chief.
    """

    def __init__(self, function: Callable[[tf.distribute.InputContext], tf.data.Dataset], pipelines: int):
        self._function = function
        self.pipelines = pipelines
        self._traced: dict[int, Callable[[], tf.data.Dataset]] = {}
        self._tracing = threading.Lock()
        self._sent: dict[Any, Any] = {}  # arrays, as tensors that all pipelines share
        self.element_spec = self.dataset(0).element_spec

    def __iter__(self) -> PipelinesIterator:
        return PipelinesIterator(self)

    def open_at(self, number: int, steps: int, ready: Callable[[], None]) -> PipelinesIterator:
        """Returns a pass that skips, in each pipeline, the average number of batches per worker in `steps` steps."""
        return PipelinesIterator(self, -(-steps // self.pipelines))

    def dataset(self, pipeline: int) -> tf.data.Dataset:
        """Creates the dataset of a pipeline on the current device."""
        with self._tracing:
            if pipeline not in self._traced:
                self._traced[pipeline] = self.trace(pipeline)
        return self._traced[pipeline]()

    def example_batch(self) -> Structure:
        """Returns a batch of one example of zeros, from which a model is built."""

        def zero(spec: tf.TensorSpec) -> tf.Tensor:
            return tf.zeros([1 if size is None else size for size in spec.shape], spec.dtype)

        return tf.nest.map_structure(zero, self.element_spec, expand_composites=True)

    def batches(self, pipeline: int = 0) -> int | None:
        """Returns the number of batches of a pipeline, or None if it is unknown or infinite."""
        number = int(self.dataset(pipeline).cardinality())
        return number if number >= 0 else None

    def total(self) -> int | None:
        """Returns the number of batches of all pipelines, or None if it is unknown or infinite."""
        total = 0
        for pipeline in range(self.pipelines):
            batches = self.batches(pipeline)
            if batches is None:
                return None
            total += batches
        return total

    def is_endless(self) -> bool:
        """Returns whether the pipelines never end."""
        return bool(self.dataset(0).cardinality() == tf.data.INFINITE_CARDINALITY)

    def trace(self, pipeline: int) -> Callable[[], tf.data.Dataset]:
        """Traces the dataset function for a pipeline; returns a function that creates the pipeline's dataset."""
        context = tf.distribute.InputContext(self.pipelines, pipeline, num_replicas_in_sync=1)

        def make() -> tf.data.Dataset:
            # Converts an `if` in a map's function, as outside of a `tf.function`.
            with tf_internals.autograph_as_outside_of_functions(), sent_arrays.sent(self._sent):
                return self._function(context)

        try:
            traced = tf.function(make, autograph=False).get_concrete_function()
        except (TypeError, ValueError) as e:
            if "out of scope" in str(e) or "outside" in str(e):
                raise ConfigError(_OUTSIDE.format("a TensorFlow object")) from e
            if "2GB" in str(e):
                raise ConfigError(_TOO_LARGE) from e
            raise
        if not isinstance(traced.structured_outputs, (tf.data.Dataset, tf.data.DatasetSpec)):
            raise ConfigError(
                f"A dataset function must return a tf.data.Dataset. Received: {type(traced.structured_outputs).__name__}."
            )
        for tensor in traced.captured_inputs:
            if tensor.dtype == tf.variant:
                raise ConfigError(_OUTSIDE.format("a dataset"))
            if tensor.dtype == tf.resource:
                raise ConfigError(
                    _OUTSIDE.format("a variable, table or iterator")
                    + " A lookup table is the chief's wherever it is created: let a layer of the model look up."
                )
        if sum(_bytes(op) for op in traced.graph.get_operations() if op.type == "Const") > sent_arrays.LARGEST:
            raise ConfigError(_TOO_LARGE)
        graph = traced.graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        if any(node.op in _PYTHON for node in nodes):
            raise ConfigError(
                "The dataset function calls Python (from_generator, py_function or numpy_function) in the "
                "chief's process, but runs on the workers: write it in TensorFlow's operations, or give Trainer.fit the "
                "generator itself, which the chief then reads."
            )
        return traced


class PipelinesIterator:
    """One pass over the pipelines, without the first `skipped` batches of each.

    In training each worker has its own iterator, and a new one after the worker was lost. In evaluation and prediction any
    worker runs a complete pipeline. If that worker is lost, another one runs the pipeline again, so that each batch counts once.

    Attributes:
        results: Results of an evaluation that are not read yet; None before the evaluation has begun.
        element_spec: The specification of the iterators from which steps take their batches.
    """

    def __init__(self, data: WorkerDataset, skipped: int = 0):
        self._skipped = skipped
        self.results: collections.deque[list[np.ndarray]] | None = None
        self._data = data
        self.element_spec = tf.data.IteratorSpec(data.element_spec)
        self._iterators: dict[int, DataIterator] = {}
        self._is_checked = False

    def __next__(self) -> Structure:
        return self._data.example_batch()  # for building a model; steps take their batches on the workers

    def check(self, steps: int | None) -> None:
        """Raises ConfigError unless the data suffice for an epoch of `steps`, which must be known."""
        if self._is_checked:
            return
        if steps is None:
            raise ConfigError("fit needs steps_per_epoch where workers make the data with a dataset function.")
        batches = self._data.batches()
        if batches is not None and batches < steps:
            raise ConfigError(
                f"The epoch has {steps} steps, but the dataset that the dataset function returns has {batches} batches, and "
                "one worker may have to take all steps: let it return dataset.repeat(), and give fit steps_per_epoch."
            )
        self._is_checked = True

    def next(self, run: Callable[[DataIterator], Structure], worker: int) -> Structure:
        """Runs `run(iterator)` with the worker's own iterator, on the current device."""
        iterator = self._iterators.pop(worker, None)
        if iterator is None:
            iterator = iter(self._data.dataset(worker).skip(self._skipped))
        try:
            result = run(iterator)
        except tf.errors.OutOfRangeError as e:
            raise ConfigError(
                f"The dataset of worker:{worker} has ended, and the number of steps that each worker takes is not "
                "known in advance: let the dataset function return dataset.repeat()."
            ) from e
        self._iterators[worker] = iterator  # not after an error
        return result

    def run_all(
        self, step: WorkerStep, traced: TracedStep, scheduler: Scheduler, steps: int | None
    ) -> Iterator[list[np.ndarray]]:
        """Runs `step` on every batch, or on the first `steps` batches of all pipelines in turn; yields the results in order.

        Raises ConfigError if the data are endless and `steps` is None.
        """
        if steps is None and self._data.is_endless():
            raise ConfigError("The dataset function returns an endless dataset: give the number of steps, too.")
        # Batch n of the evaluation is batch n // pipelines of pipeline n % pipelines. A function runs a whole pipeline, because a
        # worker that repeats a lost worker's part must start its iterator again.
        pipelines = self._data.pipelines
        step.begin()
        inputs = step.step_inputs(0, 0, 0).numpy()

        def run(pipeline: int, worker: int) -> list[list[np.ndarray]]:
            results: list[list[np.ndarray]] = []
            iterator = iter(self._data.dataset(pipeline))
            for number in itertools.count(pipeline, pipelines):
                if steps is not None and number >= steps:
                    break
                if results:
                    scheduler.begin_next_step(worker)
                try:
                    step_inputs = tf.constant([0, 0, inputs[2] + number, *inputs[3:]], tf.float64)
                    results.append(step.call(traced, iterator, step_inputs))
                except tf.errors.OutOfRangeError:
                    break
            return results

        done: list[list[list[np.ndarray]]] = []
        flight = InFlight(scheduler, done.append, ordered=True)
        for pipeline in range(pipelines):
            flight.add(functools.partial(run, pipeline), id(traced))
        flight.drain()
        for row in itertools.zip_longest(*done):
            yield from (result for result in row if result is not None)
