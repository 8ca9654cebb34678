"""The function that the chief runs for each execution: it schedules steps, and later counts them, which adds their results to the metrics.

Readers of metrics or weights first wait for the scheduled steps (`drain_first`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import DataIterator, Function, Step, Structure
from tfdist.compat import keras_internals, unsupported
from tfdist.engine import Engine, RunningMeans
from tfdist.parameter_server.scheduler import MAX_IN_FLIGHT, MAX_REORDERED, InFlight, Scheduler
from tfdist.parameter_server.worker_dataset import PipelinesIterator
from tfdist.parameter_server.worker_step import TracedStep, WorkerStep
from tfdist.replicas import batch_splitting
from tfdist.runtime.report.phase import phase

# Results of several steps are read together: the maximum number of ended steps with unread results per worker, and its minimum in total.
_UNREAD = 4
_UNREAD_LEAST = 10
ROWS = MAX_IN_FLIGHT + MAX_REORDERED + _UNREAD_LEAST


class Execution:
    """A `train_function` or `test_function` that schedules steps and returns the logs so far. Its creation attaches the engine to the model.

    Attributes:
        measured: Means for TensorBoard, by tag: steps in flight when a step was scheduled; the staleness of updates; and how long
            the chief waited for a batch that it reads itself.
        step_ms: The mean milliseconds of a step by worker, such as `worker:0`.
    """

    def __init__(self, model: keras.Model, engine: Engine, scheduler: Scheduler, step: Step):
        unsupported.check_model(model)  # the model may have been recompiled
        engine.attach(model)
        self._engine = engine
        self.measured = RunningMeans()
        self.step_ms = RunningMeans()
        self._model = model
        self._scheduler = scheduler
        self._step = step
        self.trains = step == model.train_step
        self._steps = int(model.steps_per_execution)
        self._unread_limit = max(_UNREAD * scheduler.workers, _UNREAD_LEAST)
        self._worker_step: WorkerStep | None = None
        self._attempt_ids = itertools.count(1)  # never twice, because a step that was given up may still write its row
        self._logs: dict[str, Any] = {}
        self._has_data = False  # whether the chief has read a batch
        self._has_run = False  # whether its function is compiled
        self._reset()

    def _reset(self) -> None:
        # Ordered results give an evaluation the same sums in every run.
        running: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        if self.trains:
            running = functools.partial(self._scheduler.staleness.step, self.measured)
        self._flight = InFlight(self._scheduler, self._end_step, ordered=not self.trains, running=running)
        # The traced step, its row and its function, by attempt id.
        self._scheduled: dict[int, tuple[TracedStep, int, Callable[[int], int]]] = {}
        self._free = collections.deque(range(ROWS * self._scheduler.workers))
        self._unread: list[int] = []
        self._steps_since_drain: int | None = None  # number of steps since the last drain; None if no step is scheduled

    def __call__(self, iterator: DataIterator) -> dict[str, Any]:
        """Schedules the steps of one execution, and returns the logs so far. Raises StopIteration at the end of the data."""
        logs = self.run(iterator, getattr(self._engine, "remaining_steps", None))
        if logs is None:
            raise StopIteration
        return logs

    def run(self, iterator: DataIterator, remaining_steps: int | None = None) -> dict[str, Any] | None:
        """Schedules the steps of an execution; returns the logs so far, or None at the end of the data.

        `remaining_steps` is the number of steps until the end of the epoch or evaluation, None if unknown. Raises ClusterError as
        `ParameterServerEngine.running` does, and ConfigError for unsuitable data (see `WorkerDataset` and `PipelinesIterator`).
        """
        if self._has_run:
            return self._run(iterator, remaining_steps)
        with phase("compiling", is_first=True):
            logs = self._run(iterator, remaining_steps)
        self._has_run = True
        return logs

    def _run(self, iterator: DataIterator, remaining_steps: int | None) -> dict[str, Any] | None:
        steps = self._steps if remaining_steps is None else min(self._steps, remaining_steps)
        for number in range(steps):
            try:
                self._schedule(iterator, remaining_steps)
            except (StopIteration, tf.errors.OutOfRangeError):
                if number == 0:
                    return None
                break
        last = remaining_steps is not None and remaining_steps <= self._steps
        if last or not isinstance(iterator, (tf.data.Iterator, PipelinesIterator)):
            self.drain()  # the last steps of the epoch, or a single step of train_on_batch
        elif not self._logs:
            self._flight.wait_for_first()
            self._read()
        return self._logs

    def drain(self) -> None:
        """Waits until all scheduled steps are counted."""
        while self._flight.count or self._unread:
            self._flight.drain()
            self._read()
        self._steps_since_drain = None

    def end(self) -> None:
        """Ends a pass. After an error, steps in flight still count if they end within some seconds."""
        if not self._scheduler.has_lost_servers:
            self._flight.wait_after_error()
            try:
                self._read()
            except tf.errors.OpError:  # the servers may be lost
                pass
        if self.trains:
            self._scheduler.retried_steps += self._flight.retries
        self._reset()

    def _schedule(self, iterator: DataIterator, remaining_steps: int | None) -> None:
        if self._worker_step is None:  # by now metrics have variables
            self._worker_step = WorkerStep(self._model, self._step, ROWS * self._scheduler.workers)
        step = self._worker_step
        if self._steps_since_drain is None:
            step.begin()
            self._steps_since_drain = 0
            self._logs = {}
        if isinstance(iterator, PipelinesIterator):
            if not self.trains:  # each pipeline runs as one function, which returns its counts: no step is in flight
                self._steps_since_drain = None
                self._count_pipelines(step, iterator, remaining_steps)
                return
            iterator.check(remaining_steps)
            run = iterator.next
            spec = iterator.element_spec
        else:
            data = self._read_batch(iterator)
            run = functools.partial(_run_on, data)
            spec = getattr(iterator, "element_spec", data)
        traced = step.trace(spec)
        if not self._free:  # every row of the results table has a step that is not counted yet
            self.drain()
            step.begin()
            self._steps_since_drain = 0
        attempt_id = next(self._attempt_ids)
        row = self._free.popleft()
        inputs = step.step_inputs(attempt_id, row, self._steps_since_drain)

        def function(worker: int) -> int:
            begun = time.perf_counter()
            run(lambda batch: step.call(traced, batch, inputs), worker)
            self.step_ms.add(f"worker:{worker}", 1000 * (time.perf_counter() - begun))
            return attempt_id

        self._steps_since_drain += 1
        self._scheduled[attempt_id] = traced, row, function
        self._flight.add(function, id(traced))
        self.measured.add("ps/steps_in_flight", self._flight.count)

    def _read_batch(self, iterator: DataIterator) -> Structure:
        """Returns the next batch of the data that the chief reads; measures the wait."""
        began = time.perf_counter()
        with phase("data", is_first=not self._has_data):
            data = batch_splitting.without_optionals(next(iterator))
        self._has_data = True
        record = self._model.distribute_strategy.batch_record
        if record and self.trains:
            record.add(data)
        self.measured.add("perf/input_wait_ms", (time.perf_counter() - began) * 1000)
        return data

    def _count_pipelines(self, step: WorkerStep, iterator: PipelinesIterator, remaining_steps: int | None) -> None:
        traced = step.trace(iterator.element_spec, returns=True)
        if iterator.results is None:
            results = iterator.run_all(step, traced, self._scheduler, remaining_steps)
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
        unread = self._unread
        self._unread = []  # first, because a retried step below may end at once
        for traced, group in itertools.groupby(unread, key=lambda attempt_id: self._scheduled[attempt_id][0]):
            attempt_ids = list(group)
            rows = traced.results.read(attempt_ids, [self._scheduled[attempt_id][1] for attempt_id in attempt_ids])  # type: ignore[union-attr]
            self._count(self._worker_step, traced, [numbers for numbers in rows if numbers is not None])
            for attempt_id, numbers in zip(attempt_ids, rows, strict=True):
                if numbers is None:
                    self._flight.retries += 1
                    self._flight.add(self._scheduled[attempt_id][2])
                else:
                    self._free.append(self._scheduled.pop(attempt_id)[1])

    def _count(self, step: Any, traced: TracedStep, rows: Sequence[np.ndarray]) -> None:
        if not rows:
            return
        logs = step.commit(traced, np.stack(rows)) | step.custom_logs(traced, rows[-1])
        self._logs.clear()
        self._logs.update({name: logs[name] for name in traced.names})


def _run_on(data: Structure, run: Callable[[DataIterator], Structure], worker: int) -> Structure:
    return run(data)


class MakeExecution:
    """Makes a model's functions. `made` holds the newest `Execution` of its training step and of its test step."""

    def __init__(self, model: keras.Model, engine: Engine, scheduler: Scheduler):
        self._arguments = model, engine, scheduler
        self.made: dict[bool, Execution] = {}

    def __call__(self, step: Step) -> Execution:
        """Returns the function of a step."""
        execution = Execution(*self._arguments, step)
        self.made[execution.trains] = execution
        return execution


def executions(model: keras.Model) -> list[Execution]:
    """Returns the newest executions of a model, also if its own functions call them."""
    make = keras_internals.make_function(model)
    if not isinstance(make, MakeExecution):
        return []
    return list(make.made.values())


def drain_first(model: keras.Model, method: Function, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a model after all scheduled steps are counted, because callbacks read metrics and save within an epoch."""
    if not tf.inside_function():  # not while a step is traced
        drain_steps(model)
    return method(*args, **kwargs)


def drain_steps(model: keras.Model) -> None:
    """Waits until all scheduled steps of `model` are counted."""
    for execution in executions(model):
        execution.drain()
