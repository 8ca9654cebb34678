"""The engine of parameter-server training: Keras' own loops run on the chief, their steps on the workers.

Keras' loops call a function for each step. Here it schedules the step on any worker, several at once for each worker,
and returns the logs of the steps that have completed so far; the most recent ones are still in flight. At the end of an
epoch or an evaluation all have completed. A dataset is read by the chief, which sends each batch once; a function of an
input context makes the data on the workers.

Workers do not wait for each other: other workers' steps may have changed the weights since a gradient was computed,
about as often as there are other workers. Adam's moments and weights take each update in one atomic addition, but the
difference that is added comes from values which may have changed since, too.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_internals, optimizer_search
from tfdist.engine import Engine
from tfdist.errors import ConfigError
from tfdist.gradients.update import deduplicate_rows_before_update
from tfdist.parameter_server import server
from tfdist.parameter_server.execution import DrainFirst, Execution, drain_steps
from tfdist.parameter_server.scheduler import InFlight, Scheduler
from tfdist.parameter_server.strategy import ParameterServerStrategy, bytes_per_server
from tfdist.parameter_server.worker_dataset import Pipelines, PipelinesIterator, WorkerDataset
from tfdist.parameter_server.worker_step import TracedStep, WorkerStep, without_optionals
from tfdist.step import model_building

# Methods of a model that read what steps have counted.
_DRAIN_FIRST_METHODS = ("get_metrics_result", "save", "save_weights", "get_weights")
_WORKER_DATA = "worker_data"  # an attribute of the placeholder dataset: what the workers read


class ParameterServerEngine(Engine):
    """Trains, evaluates and predicts on a cluster's workers.

    Args:
        strategy: The strategy.
        compressor: None, as workers send gradients to the servers as they are.
    """

    def __init__(self, strategy: ParameterServerStrategy, compressor: None = None):
        self._strategy = strategy
        self.scheduler = Scheduler(strategy)
        self.num_replicas = self.scheduler.workers
        self._preemption = server.PreemptionListener()

    def attach(self, model: keras.Model) -> None:
        """Makes Keras build `model`'s training and test functions here. In place."""
        if not keras_internals.has_replaced_make_function(model):
            keras_internals.replace_make_function(model, functools.partial(Execution, model, self, self.scheduler))
            for method in _DRAIN_FIRST_METHODS:
                setattr(model, method, DrainFirst(model, method))
            model.train_function = model.test_function = None
        model_building.adopt(model)
        for optimizer in optimizer_search.optimizers(model):
            update_on_servers(optimizer)

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[None]:
        """Lets Keras' `fit` and `evaluate` run on the workers; explains what is lost.

        Raises:
            ClusterError: A parameter server is lost, or all workers are.
        """

        def distribute(dataset: tf.data.Dataset) -> Any:
            drain_steps(model)  # before a callback's evaluation resets the metrics
            return self._distribute(dataset)

        with self._distributing(model, distribute) as outermost:
            try:
                yield
            finally:
                for function in (model.train_function, model.test_function):
                    if outermost and isinstance(function, Execution):
                        function.end()

    def drain(self, model: keras.Model) -> None:
        """Waits until all steps of `model` that are scheduled are counted."""
        drain_steps(model)

    def explaining_errors(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that turns TensorFlow's error into one that names the lost parameter server."""
        return self.scheduler.explain_errors()

    def peer_preempted(self) -> bool:
        """Returns whether a parameter server has received SIGTERM."""
        return self._preemption()

    def on_exit(self) -> None:
        """Sends the exit code of this process to the other tasks."""
        server.publish_exit_code(self._strategy.cluster)

    def report(self, model: keras.Model) -> dict[str, Any]:
        """Returns `retried_steps`, and `bytes_per_server`: the size of the model's and its optimizers' variables on each."""
        return {"retried_steps": self.scheduler.retried_steps, "bytes_per_server": bytes_per_server(model)}

    @contextlib.contextmanager
    def predicting(self, model: keras.Model, steps: int | None) -> Iterator[None]:
        """As `running`, for `predict`."""
        if not model.built:
            raise ConfigError(
                f"Model {model.name!r} has no variables yet, and they are to be on the servers: give it a keras.Input, or "
                "call its build(), in `with trainer.scope():`."
            )

        def distribute(dataset: tf.data.Dataset) -> Predictions:
            return Predictions(model.predict_function, self._distribute(dataset), steps)

        with self._distributing(model, distribute):
            yield

    @contextlib.contextmanager
    def _distributing(self, model: keras.Model, distribute: Callable[[Any], Any]) -> Iterator[bool]:
        """Distributes the data of Keras' loops inside; yields whether this is the outermost loop, not one in a callback."""
        before, self._strategy.distributor = self._strategy.distributor, distribute
        if not isinstance(model.predict_function, Predictor):
            model.predict_function = Predictor(model, self.scheduler)
        try:
            with self.scheduler.explain_errors():
                yield before is None
        finally:
            self._strategy.distributor = before

    def distribute(self, make: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        """Returns a dataset to give to Keras in place of those that `make` makes on the workers."""
        data = WorkerDataset(make, self.scheduler.workers)
        batches = data.total()
        dataset = tf.data.Dataset.range(batches) if batches is not None else tf.data.Dataset.from_tensors(0).repeat()
        if batches is None and not data.is_endless():
            dataset = dataset.filter(lambda _: True)  # of unknown number
        setattr(dataset, _WORKER_DATA, data)
        return dataset

    def _distribute(self, dataset: tf.data.Dataset) -> Any:
        data = getattr(dataset, _WORKER_DATA, None)
        return Pipelines(data) if data else dataset


def update_on_servers(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the arithmetic of updates run on the server of each variable, so that only the gradient travels. In place.

    `assign_add` and `assign_sub` are atomic there; an `assign` of a value computed from the old one (SGD's momentum) is
    not, and of two at once the later one holds.
    """
    if keras_internals.has_replaced_variable_update(optimizer):
        return
    deduplicate_rows_before_update(optimizer)
    update_step, weight_decay = keras_internals.variable_update_methods(optimizer)

    def on_server(gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        with tf.device(variable.device):
            update_step(gradient, variable, learning_rate)

    def decay(variables: Any) -> None:
        for variable in variables:
            with tf.device(getattr(variable, "value", variable).device):
                weight_decay([variable])

    keras_internals.replace_variable_update(optimizer, on_server, decay)


class Predictor:
    """The function that `predict` calls for each execution; also used by a callback's own `model.predict`.

    The workers compute some batches ahead of Keras' loop.

    Args:
        model: The model.
        scheduler: Schedules its steps.
    """

    def __init__(self, model: keras.Model, scheduler: Scheduler):
        self.model = model
        self.scheduler = scheduler

    @functools.cached_property
    def step(self) -> WorkerStep:
        """The model's `predict_step`, when the model has its variables."""
        return WorkerStep(self.model, self.model.predict_step)

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Returns the outputs of a list of batches, as of one."""
        each = [b.value if isinstance(b, _Outputs) else next(self.outputs([b], b)) for b in batches]
        return each[0] if len(each) == 1 else tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *each)

    def outputs(self, batches: Iterable[Any], spec: Any) -> Iterator[Any]:
        """Yields the outputs of batches in their order, computed some batches ahead."""
        traced = self.step.trace(spec)
        self.step.begin()
        ready: collections.deque[list[np.ndarray]] = collections.deque()
        flight = InFlight(self.scheduler, ready.append, ordered=True)
        for number, batch in enumerate(batches):
            inputs = self.step.step_inputs(0, 0, number)
            flight.add(functools.partial(self._run, traced, without_optionals(batch), inputs))
            while ready:
                yield traced.packed(ready.popleft())
        flight.drain()
        while ready:
            yield traced.packed(ready.popleft())

    def worker_outputs(self, pipelines: PipelinesIterator, steps: int | None) -> Iterator[Any]:
        """Yields the outputs of the workers' pipelines."""
        traced = self.step.trace(pipelines.element_spec)
        for arrays in pipelines.run_all(self.step, traced, self.scheduler, steps):
            yield traced.packed(arrays)

    def _run(self, traced: TracedStep, batch: Any, inputs: tf.Tensor, worker: int) -> list[np.ndarray]:
        return self.step.call(traced, batch, inputs)


class Predictions:
    """The outputs that `predict` iterates over in place of batches.

    Args:
        predictor: Computes outputs.
        data: A dataset, or `Pipelines`.
        steps: How many batches, or None for all.
    """

    def __init__(self, predictor: Predictor, data: Any, steps: int | None):
        self._predictor = predictor
        self._data = data
        self._steps = steps

    def __iter__(self) -> Iterator[_Outputs]:
        if isinstance(self._data, Pipelines):
            outputs = self._predictor.worker_outputs(iter(self._data), self._steps)
        else:
            outputs = self._predictor.outputs(itertools.islice(self._data, self._steps), self._data.element_spec)
        return map(_Outputs, outputs)


class _Outputs:
    """A batch's outputs, where Keras' `predict` expects a batch."""

    def __init__(self, value: Any):
        self.value = value
