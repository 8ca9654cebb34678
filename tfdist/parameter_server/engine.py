"""Keras' own `fit`, `evaluate` and `predict` on the chief of a parameter-server cluster, their steps on its workers.

Keras' loops call a function for each step. Here it schedules the step on any worker, several at once for each worker,
and returns the logs so far: of those steps whose results have arrived, which the last few scheduled are not. At the end
of an epoch or an evaluation all have. Data that are given themselves are read by the chief, which sends each batch once;
a function of an input context makes the data on the workers.

Workers do not wait for each other: a gradient is of weights that other workers' steps may have changed since, about as
often as there are other workers. Adam's moments and weights take each update in one atomic addition, but of a difference
that was computed from values which may have changed since, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import keras_internals, optimizer_search
from tfdist.engine import Engine
from tfdist.errors import ConfigError
from tfdist.parameter_server import termination
from tfdist.parameter_server.draining import DrainFirst, drain_steps
from tfdist.parameter_server.execution import Execution
from tfdist.parameter_server.predictor import Predictions, Predictor
from tfdist.parameter_server.scheduler import Scheduler
from tfdist.parameter_server.server_update import update_on_servers
from tfdist.parameter_server.strategy import ParameterServerStrategy, bytes_per_server
from tfdist.parameter_server.worker_dataset import Pipelines, WorkerDataset
from tfdist.step import model_building

# Methods of a model that look at what steps have counted.
_DRAIN_FIRST_METHODS = ("get_metrics_result", "save", "save_weights", "get_weights")
_WORKER_DATA = "worker_data"  # an attribute of a dataset that stands for them


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
        self._preemption = termination.PreemptionListener()

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
        """As of `Engine`."""
        drain_steps(model)

    def explaining_errors(self) -> contextlib.AbstractContextManager[None]:
        """As of `Engine`."""
        return self.scheduler.explain_errors()

    def peer_preempted(self) -> bool:
        """Whether a parameter server has been told to go."""
        return self._preemption()

    def on_exit(self) -> None:
        """Tells the other tasks with which exit code this process ends."""
        termination.publish_exit_code(self._strategy.cluster)

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
        """Takes the data of Keras' loops; yields whether it is in no other loop's callback."""
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
