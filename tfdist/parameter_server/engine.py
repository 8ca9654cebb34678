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

from tfdist.compat import keras_internals, optimizer_search, unsupported
from tfdist.errors import ConfigError
from tfdist.parameter_server.draining import DrainFirst, drain_steps
from tfdist.parameter_server.predictor import Predictions, Predictor
from tfdist.parameter_server.scheduler import MAX_IN_FLIGHT, MAX_REORDERED, InFlight, Scheduler
from tfdist.parameter_server.server_update import update_on_servers
from tfdist.parameter_server.strategy import ParameterServerStrategy
from tfdist.parameter_server.traced_step import TracedStep
from tfdist.parameter_server.worker_dataset import Pipelines, PipelinesIterator, WorkerDataset
from tfdist.parameter_server.worker_step import WorkerStep, without_optionals
from tfdist.step import model_building

# Steps of which a batch hook's logs do not know although they have ended, as they are read together: for each worker, and
# at least.
_UNREAD, _UNREAD_LEAST = 4, 10
ROWS = MAX_IN_FLIGHT + MAX_REORDERED + _UNREAD_LEAST
# Methods of a model that look at what steps have counted.
_DRAIN_FIRST_METHODS = ("get_metrics_result", "save", "save_weights", "get_weights")
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

    def attach(self, model: keras.Model) -> None:
        """Makes Keras build `model`'s training and test functions here. In place."""
        if not keras_internals.has_replaced_make_function(model):
            keras_internals.replace_make_function(model, functools.partial(Execution, model, self))
            for method in _DRAIN_FIRST_METHODS:
                setattr(model, method, DrainFirst(model, method))
            model.train_function = model.test_function = None
        model_building.adopt(model)
        for optimizer in optimizer_search.optimizers(model):
            update_on_servers(optimizer)

    @contextlib.contextmanager
    def run_on_workers(self, model: keras.Model) -> Iterator[None]:
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
        """Waits until all steps that are scheduled are counted."""
        drain_steps(model)

    @contextlib.contextmanager
    def predict_on_workers(self, model: keras.Model, steps: int | None) -> Iterator[None]:
        """As `run_on_workers`, for `predict`."""
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

    def placeholder_dataset(self, function: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        """Returns a dataset to give to Keras in place of those that `function` makes on the workers."""
        data = WorkerDataset(function, self.scheduler.workers)
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
        unsupported.check_model(model)  # it may have been compiled anew
        coordinator.attach(model)
        self.remaining_steps: int | None = None
        self._model = model
        self._coordinator = coordinator
        self._step = step
        self._trains = step == model.train_step
        self._steps = int(model.steps_per_execution)
        self._unread_limit = max(_UNREAD * coordinator.scheduler.workers, _UNREAD_LEAST)
        self._worker_step: WorkerStep | None = None
        self._logs: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        # An evaluation gives the same sums whichever worker is the fastest.
        self._flight = InFlight(self._coordinator.scheduler, self._end_step, ordered=not self._trains)
        self._scheduled: dict[int, tuple[TracedStep, int, Callable[[int], int]]] = {}  # by ticket, with its row
        self._free = collections.deque(range(ROWS * self._coordinator.scheduler.workers))
        self._unread: list[int] = []
        self._begun: int | None = None  # steps since all was drained

    def __call__(self, iterator: Any) -> dict[str, Any]:
        """Schedules the steps of an execution.

        Raises:
            ClusterError: A parameter server is lost, or all workers are.
            ConfigError: The data do not fit; see `WorkerDataset` and `PipelinesIterator`.
        """
        left, self.remaining_steps = self.remaining_steps, None
        for number in range(self._steps if left is None else min(self._steps, left)):
            try:
                self._schedule(iterator, left)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    raise
                break
        last = left is not None and left <= self._steps
        if last or not isinstance(iterator, (tf.data.Iterator, PipelinesIterator)):
            self.drain()  # the last ones of the epoch, or a single one, of train_on_batch
        elif not self._logs:
            self._flight.wait_for_first()
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
        self._flight.wait_after_error()
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
            step.begin()
            self._begun, self._logs = 0, {}
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
        if not self._free:
            self.drain()
            step.begin()
            self._begun = 0
        attempt_id, row = step.new_attempt_id(), self._free.popleft()
        given = step.step_inputs(attempt_id, row, self._begun)

        def function(worker: int) -> int:
            run(lambda batch: step.call(traced, batch, given), worker)
            return attempt_id

        self._begun += 1
        self._scheduled[attempt_id] = traced, row, function
        self._flight.add(function)

    def _count_pipelines(self, step: WorkerStep, iterator: PipelinesIterator, left: int | None) -> None:
        traced = step.trace(iterator.element_spec, returns=True)
        if iterator.results is None:
            results = iterator.run_all(step, traced, self._coordinator.scheduler, left)
            iterator.results = collections.deque(results)
        if not iterator.results:
            raise StopIteration
        self._count(step, traced, iterator.results.popleft())

    def _end_step(self, attempt_id: int) -> None:
        self._unread.append(attempt_id)
        if len(self._unread) >= self._unread_limit:
            self._read()

    def _read(self) -> None:
        """Counts the steps that have ended."""
        unread, self._unread = self._unread, []
        for traced, group in itertools.groupby(unread, key=lambda attempt_id: self._scheduled[attempt_id][0]):
            attempt_ids = list(group)
            found = traced.ledger.read(attempt_ids, [self._scheduled[attempt_id][1] for attempt_id in attempt_ids])  # type: ignore[union-attr]
            self._count(self._worker_step, traced, [numbers for numbers in found if numbers is not None])
            for attempt_id, numbers in zip(attempt_ids, found, strict=True):
                if numbers is None:
                    self._flight.retries += 1
                    self._flight.add(self._scheduled[attempt_id][2])
                else:
                    self._free.append(self._scheduled.pop(attempt_id)[1])

    def _count(self, step: Any, traced: TracedStep, rows: Sequence[np.ndarray]) -> None:
        if not rows:
            return
        logs = step.commit(traced, np.stack(rows))
        own = step.custom_logs(traced, rows[-1])
        self._logs.clear()
        self._logs.update({name: own[name] if name in own else logs[name] for name in traced.names})


def _run_on(data: Any, run: Callable[[Any], Any], worker: int) -> Any:
    return run(data)
