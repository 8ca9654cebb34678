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
import numpy as np
import tensorflow as tf

from tfdist import refusals
from tfdist.errors import ConfigError
from tfdist.parameter_servers import ParameterServerStrategy
from tfdist.scheduler import IN_FLIGHT, WAITING, InFlight, Scheduler
from tfdist.step import KERAS_MAKE_FUNCTION
from tfdist.worker_data import Pipelines, PipelinesIterator, WorkerData
from tfdist.worker_step import Traced, WorkerStep, update_on_servers, without_optionals

# Steps, for each worker, of which a batch hook's logs do not know although they have ended: they are read together.
_UNREAD = 3
ROWS = IN_FLIGHT + WAITING + _UNREAD
_WORKER_DATA = "worker_data"  # an attribute of a dataset that stands for them
_PREDICT_STEP = "_tfdist_predict_step"  # an attribute of a model, traced once


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
        step = getattr(model, _PREDICT_STEP, None)
        if step is None:
            step = WorkerStep(model, model.predict_step)
            setattr(model, _PREDICT_STEP, step)
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
        self._unread_limit = _UNREAD * coordinator.scheduler.workers
        self._worker_step: WorkerStep | None = None
        self._logs: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        # An evaluation gives the same sums whichever worker is the fastest.
        self._flight = InFlight(self._coordinator.scheduler, self._end_step, ordered=not self._trains)
        self._scheduled: dict[int, tuple[Traced, Callable[[int], int]]] = {}  # by ticket
        self._unread: list[int] = []
        self._begun: int | None = None  # steps since all was drained, before which there were `_first`
        self._first = 0

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """Schedules the steps of an execution.

        Raises:
            ClusterError: A parameter server is lost, or all workers are.
            ConfigError: The data do not fit; see `WorkerData` and `PipelinesIterator`.
        """
        left, self.left = self.left, None
        for number in range(self._steps if left is None else min(self._steps, left)):
            try:
                self._schedule(iterator, left)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    raise
                break
        if left is not None and left <= self._steps:
            self.drain()  # the last ones of the epoch
        elif not self._logs:
            self._flight.first()
            self._read()
        return self._logs

    def drain(self) -> None:
        """Waits until all steps that are scheduled are counted."""
        while self._flight.count or self._unread:
            self._flight.drain()
            self._read()
        self._begun = None

    def end(self) -> None:
        """Ends a pass. After an error, steps that are on their way still count if they end within some seconds."""
        self._flight.settle()
        with contextlib.suppress(tf.errors.OpError):  # the servers may be what is lost
            self._read()
        if self._trains:
            self._coordinator.retried_steps += self._flight.retries
        self._reset()

    def _schedule(self, iterator: Any, left: int | None) -> None:
        if self._worker_step is None:  # by now metrics have variables
            self._worker_step = WorkerStep(self._model, self._step, ROWS * self._coordinator.scheduler.workers)
        step = self._worker_step
        if self._begun is None:
            self._first, self._begun, self._logs = step.begin(), 0, {}
        if isinstance(iterator, PipelinesIterator) and not self._trains:
            self._begun = None
            self._count_pipelines(step, iterator, left)
            return
        spec = getattr(iterator, "element_spec", None)
        if isinstance(iterator, PipelinesIterator):
            iterator.check(left)
            run = iterator.next
        else:
            data = without_optionals(next(iterator))
            run = functools.partial(_run_on, data)
            spec = data if spec is None else spec
        traced = step.trace(spec)
        ticket, given = step.ticket(), self._first + self._begun
        given = step.given(ticket, given)

        def function(worker: int) -> int:
            run(lambda batch: step.call(traced, batch, given), worker)
            return ticket

        self._begun += 1
        self._scheduled[ticket] = traced, function
        self._flight.add(function)

    def _count_pipelines(self, step: WorkerStep, iterator: PipelinesIterator, left: int | None) -> None:
        traced = step.trace(iterator.element_spec, returns=True)
        if iterator.results is None:
            results = iterator.run_all(step, traced, self._coordinator.scheduler, left)
            iterator.results = collections.deque(results)
        if not iterator.results:
            raise StopIteration
        self._count(step, traced, iterator.results.popleft())

    def _end_step(self, ticket: int) -> None:
        self._unread.append(ticket)
        if len(self._unread) >= self._unread_limit:
            self._read()

    def _read(self) -> None:
        """Counts the steps that have ended."""
        unread, self._unread = self._unread, []
        for traced, group in itertools.groupby(unread, key=lambda ticket: self._scheduled[ticket][0]):
            tickets = list(group)
            rows = traced.ledger.read(tickets)  # type: ignore[union-attr]
            self._count(self._worker_step, traced, [row for row in rows if row is not None])
            for ticket, row in zip(tickets, rows, strict=True):
                _, function = self._scheduled.pop(ticket)
                if row is None:
                    self._scheduled[ticket] = traced, function
                    self._flight.add(function)
                    self._flight.retries += 1

    def _count(self, step: Any, traced: Traced, rows: Sequence[np.ndarray]) -> None:
        if not rows:
            return
        logs = step.commit(np.stack(rows))
        own = step.own_logs(traced, rows[-1])
        self._logs.clear()
        # Of its own logs, those named as metrics are theirs.
        self._logs.update({name: logs.get(name, value) for name, value in own.items()} if own else logs)


def _run_on(data: Any, run: Callable[[Any], Any], worker: int) -> Any:
    return run(data)


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
        step = self._step
        if isinstance(self._data, Pipelines):
            pipelines = iter(self._data)
            traced = step.trace(pipelines.element_spec)
            for outputs in pipelines.run_all(step, traced, self._scheduler, self._steps):
                yield _packed(traced, outputs)
            return
        traced = step.trace(self._data.element_spec)
        ready: collections.deque[list[np.ndarray]] = collections.deque()
        flight = InFlight(self._scheduler, ready.append, ordered=True)
        first = step.begin()
        for number, batch in enumerate(itertools.islice(self._data, self._steps)):
            given = step.given(0, first + number)
            flight.add(functools.partial(_predict, step, traced, without_optionals(batch), given))
            while ready:
                yield _packed(traced, ready.popleft())
        flight.drain()
        while ready:
            yield _packed(traced, ready.popleft())


def _predict(step: WorkerStep, traced: Traced, batch: Any, given: tf.Tensor, worker: int) -> list[np.ndarray]:
    return step.call(traced, batch, given)


def _packed(traced: Traced, outputs: Sequence[np.ndarray]) -> Any:
    structure = traced.function.structured_outputs
    return tf.nest.pack_sequence_as(structure, list(map(tf.constant, outputs)), expand_composites=True)


def _joined(outputs: Sequence[Any]) -> Any:
    """Returns the outputs of an execution's steps as one batch."""
    return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(lambda *each: tf.concat(each, 0), *outputs)
