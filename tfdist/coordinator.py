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

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import refusals
from tfdist.errors import ConfigError
from tfdist.parameter_servers import ParameterServerStrategy
from tfdist.scheduler import InFlight, Scheduler
from tfdist.step import KERAS_MAKE_FUNCTION
from tfdist.worker_data import Pipelines, PipelinesIterator, WorkerData
from tfdist.worker_step import WorkerStep, plain, update_on_servers

_WORKER_DATA = "worker_data"  # an attribute of a dataset that stands for them


class Coordinator:
    """Trains, evaluates and predicts on a cluster's workers.

    Args:
        strategy: The strategy.

    Attributes:
        retried_steps: Training steps that ran again because their worker was lost. The lost worker's update may have
            been applied in whole, in part, or not at all.
    """

    def __init__(self, strategy: ParameterServerStrategy):
        self._strategy = strategy
        self.scheduler = Scheduler(strategy)
        self.retried_steps = 0

    def adopt(self, model: keras.Model) -> None:
        """Makes Keras build `model`'s training and test functions here. In place."""
        if KERAS_MAKE_FUNCTION not in vars(model):
            setattr(model, KERAS_MAKE_FUNCTION, functools.partial(Execution, model, self))
            model.get_metrics_result = _DrainedMetrics(model)
            model.train_function = model.test_function = None
        for optimizer in refusals.optimizers(model):
            update_on_servers(optimizer)

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[None]:
        """Lets Keras' `fit` and `evaluate` run on the workers; explains what is lost.

        Raises:
            ClusterError: A parameter server is lost, or all workers are.
        """
        self._strategy.distributor = self._distribute
        try:
            with self.scheduler.explained():
                yield
        finally:
            self._strategy.distributor = None
            for function in (model.train_function, model.test_function):
                if isinstance(function, Execution):
                    function.end()

    @contextlib.contextmanager
    def predicting(self, model: keras.Model, steps: int | None) -> Iterator[None]:
        """As `running`, for `predict`."""
        if not model.built:
            raise ConfigError(
                f"Model {model.name!r} has no variables yet, and they are to be on the servers: give it a keras.Input, or "
                "call its build(), in `with trainer.scope():`."
            )
        step = WorkerStep(model, model.predict_step)
        self._strategy.distributor = lambda dataset: _Predictions(
            step, self.scheduler, self._distribute(dataset), steps
        )
        model.predict_function = _joined
        try:
            with self.scheduler.explained():
                yield
        finally:
            self._strategy.distributor = None
            model.predict_function = None

    def stand_in(self, function: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        """Returns a dataset to give to Keras in place of those that `function` makes on the workers."""
        data = WorkerData(function, self.scheduler.workers)
        batches = data.total()
        dataset = tf.data.Dataset.range(batches) if batches is not None else tf.data.Dataset.from_tensors(0).repeat()
        if batches is None and not data.is_endless():
            dataset = dataset.filter(lambda _: True)  # of unknown number
        setattr(dataset, _WORKER_DATA, data)
        return dataset

    def _distribute(self, dataset: tf.data.Dataset) -> Any:
        data = getattr(dataset, _WORKER_DATA, None)
        return Pipelines(data) if data else dataset


class Execution:
    """What Keras calls for each execution of one or several steps: schedules them, and returns the logs so far.

    Args:
        model: The model.
        coordinator: Schedules its steps.
        step: Its `train_step` or `test_step`.

    Attributes:
        left: How many steps there are left in the epoch or evaluation, where that is known.
    """

    def __init__(self, model: keras.Model, coordinator: Coordinator, step: Callable[[Any], Any]):
        refusals.check_model(model)  # it may have been compiled anew
        coordinator.adopt(model)
        self.left: int | None = None
        self._model = model
        self._coordinator = coordinator
        self._step = step
        self._trains = step == model.train_step
        self._steps = int(model.steps_per_execution)
        self._worker_step: WorkerStep | None = None
        self._flight = self._new_flight()
        self._logs: dict[str, Any] = {}

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """Schedules the steps of an execution.

        Raises:
            ClusterError: A parameter server is lost, or all workers are.
            ConfigError: The data do not fit; see `WorkerData` and `PipelinesIterator`.
        """
        left, self.left = self.left, None
        if self._flight.is_drained:
            self._logs = {}  # of another epoch
        for number in range(self._steps if left is None else min(self._steps, left)):
            try:
                self._schedule(iterator, left)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    raise
                break
        if left is not None and left <= self._steps:
            self._flight.drain()  # the last one of the epoch
        else:
            self._flight.first()
        return self._logs

    def drain(self) -> None:
        """Waits until all steps that are scheduled have arrived."""
        self._flight.drain()

    def end(self) -> None:
        """Ends a pass. After an error, steps that are on their way still count if they arrive within some seconds."""
        self._flight.settle()
        if self._trains:
            self._coordinator.retried_steps += self._flight.retries
        self._flight = self._new_flight()

    def _new_flight(self) -> InFlight:
        # So that an evaluation gives the same sums whichever worker is the fastest.
        return InFlight(self._coordinator.scheduler, self._commit, ordered=not self._trains)

    def _schedule(self, iterator: Any, left: int | None) -> None:
        if self._worker_step is None:  # by now metrics have variables
            self._worker_step = WorkerStep(self._model, self._step)
        step = self._worker_step
        if isinstance(iterator, PipelinesIterator) and not self._trains:
            if iterator.results is None:
                iterator.results = collections.deque(iterator.run_all(step, self._coordinator.scheduler, left))
            if not iterator.results:
                raise StopIteration
            self._commit(iterator.results.popleft())
            return
        given = step.given(step.number + self._flight.count)
        if isinstance(iterator, PipelinesIterator):
            iterator.check(left)
            self._flight.add(iterator.call(step, given))
        else:
            self._flight.add(step.call(next(iterator), given, getattr(iterator, "element_spec", None)))

    def _commit(self, result: Callable[[], Any]) -> None:
        counted, own = result()
        logs = self._worker_step.commit(counted)  # type: ignore[union-attr]
        self._logs.clear()
        # Of its own logs, those named as metrics are theirs.
        self._logs.update({name: logs.get(name, plain(value)) for name, value in own.items()} if own else logs)


class _DrainedMetrics:
    """`get_metrics_result`, which Keras calls at the end of an epoch or evaluation: all steps have arrived by then."""

    def __init__(self, model: keras.Model):
        self._model = model

    def __call__(self) -> dict[str, Any]:
        model = self._model
        if not tf.inside_function():  # where a step is traced
            for function in (model.train_function, model.test_function):
                if isinstance(function, Execution):
                    function.drain()
        return type(model).get_metrics_result(model)


class _Predictions:
    """What `predict` iterates over: the outputs of the batches of `data`, computed some batches ahead.

    Args:
        step: The model's `predict_step`.
        scheduler: Schedules it.
        data: A dataset, or `Pipelines`.
        steps: How many, or None for all.
    """

    def __init__(self, step: WorkerStep, scheduler: Scheduler, data: Any, steps: int | None):
        self._step = step
        self._scheduler = scheduler
        self._data = data
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._data, Pipelines):
            for result in iter(self._data).run_all(self._step, self._scheduler, self._steps):
                yield result()
            return
        ready: collections.deque[Callable[[], Any]] = collections.deque()
        flight = InFlight(self._scheduler, ready.append, ordered=True)
        for number, batch in enumerate(itertools.islice(self._data, self._steps)):
            flight.add(self._step.call(batch, self._step.given(number), self._data.element_spec))
            while ready:
                yield ready.popleft()()
        flight.drain()
        while ready:
            yield ready.popleft()()


def _joined(outputs: Sequence[Any]) -> Any:
    """Returns the outputs of an execution's steps as one batch."""
    return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(lambda *each: tf.concat(each, 0), *outputs)
