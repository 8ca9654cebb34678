"""The engine of parameter-server training: loops run on the chief, and their steps on the workers.

The loops call a function for each execution. The function schedules the steps on any worker, several per worker at once,
and returns the logs of the completed steps; the most recent steps are still in flight. At the end of an epoch or an evaluation
all steps have completed. The chief reads a dataset and sends each batch once; a function of an input context runs on the
workers, which create the data.

Workers do not wait for each other: other workers' steps may have changed the weights since a gradient was computed,
about as often as there are other workers. Each update adds to Adam's moments and weights in one atomic addition, but the
added difference comes from values that may also have changed since.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import DataIterator, Gradient, Logs, Spec, StepFunction, Structure
from tfdist.compat import keras_internals, keras_loops, optimizer_search
from tfdist.data.source import DataSource, Passes, run_to_end
from tfdist.data.stored import StoredData
from tfdist.engine import Engine
from tfdist.errors import ConfigError
from tfdist.gradients import row_updates
from tfdist.gradients.update import deduplicate_rows_before_update
from tfdist.layers import row_lookups
from tfdist.parameter_server import server
from tfdist.parameter_server.execution import Execution, MakeExecution, drain_first, drain_steps, executions
from tfdist.parameter_server.scheduler import InFlight, Scheduler
from tfdist.parameter_server.strategy import ParameterServerStrategy, bytes_per_server
from tfdist.parameter_server.worker_dataset import PipelinesIterator, WorkerDataset
from tfdist.parameter_server.worker_step import TracedStep, WorkerStep
from tfdist.replicas import batch_splitting
from tfdist.step.execution import as_number

# Methods of a model that read metrics or weights, which scheduled steps still change.
_DRAIN_FIRST_METHODS = ("get_metrics_result", "save", "save_weights", "get_weights")


class ParameterServerEngine(Engine):
    """The engine that runs steps on a cluster's workers. They send uncompressed gradients to the servers: the compressor is None."""

    strategy: ParameterServerStrategy

    def __init__(self, strategy: ParameterServerStrategy, compressor: None = None):
        self.strategy = strategy
        self.scheduler = Scheduler(strategy)
        self.num_replicas = self.scheduler.workers
        self._preemption = server.PreemptionListener()
        self._depth = 0  # of nested loops
        self.remaining_steps: int | None = None  # of the epoch, while a function of the user's runs

    def attach(self, model: keras.Model) -> None:
        """Replaces the training, test and predict functions of `model` by this engine's. In place."""
        if not keras_internals.has_replaced_make_function(model):
            keras_internals.replace_make_function(model, MakeExecution(model, self, self.scheduler))
            for method in _DRAIN_FIRST_METHODS:
                setattr(model, method, functools.partial(drain_first, model, getattr(model, method)))
            keras_internals.replace_make_prediction(model, functools.partial(Predictor, model, self.scheduler))
            model.train_function = model.test_function = model.predict_function = None
        row_lookups.look_up_rows(model)
        for optimizer in optimizer_search.optimizers(model):
            update_on_servers(optimizer, self.strategy.config.row_updates)

    @contextlib.contextmanager
    def running(self, model: keras.Model) -> Iterator[None]:
        """Prepares and ends a loop or a single step. Raises ClusterError if a parameter server or all workers are lost."""
        self._depth += 1
        try:
            with self.scheduler.explain_errors():
                yield
        finally:
            self._depth -= 1
            if not self._depth:  # a validation ends no step of the epoch around it
                for execution in executions(model):
                    execution.end()

    def source(self, dataset: tf.data.Dataset, steps: int | None) -> DataSource:
        """Returns the source of a dataset that the chief reads; the chief sends each batch to one worker."""
        return DataSource(dataset, steps=steps)

    def source_from_function(self, make: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> DataSource:
        """Returns the source of a dataset function that runs on each worker."""
        data = WorkerDataset(make, self.scheduler.workers)
        return DataSource(data, steps=data.total(), open_at=data.open_at)

    def source_from_stored(self, data: StoredData, start: int, steps: int | None) -> DataSource:
        """Returns the source of stored data that the chief reads; the chief sends each batch to one worker."""

        def open_at(number: int, done: int, ready: Callable[[], None]) -> DataIterator:
            ready()
            remaining = None if steps is None else steps - done
            return iter(data.parts(1, [0], start + done, remaining))

        per_epoch = data.steps_per_epoch if steps is None else None
        return DataSource(data.parts(1, [0], start, steps), (), steps, 1, open_at, per_epoch)

    def run(self, function: StepFunction, iterator: DataIterator, remaining_steps: int | None) -> Logs:
        if isinstance(function, Execution):
            return function.run(iterator, remaining_steps)
        self.remaining_steps = remaining_steps
        try:
            return run_to_end(function, iterator)
        finally:
            self.remaining_steps = None

    def run_batch(self, function: StepFunction, batch: Structure, is_whole: bool = True) -> Logs:
        return function(iter([batch]))

    def epoch_logs(self, model: keras.Model, function: StepFunction, logs: Logs) -> Logs:
        drain_steps(model)  # the user may have assigned the model another `get_metrics_result`
        results = keras_loops.metrics_or_logs(model, logs)
        if results is logs:
            return logs
        # A validation would change variables among the results before callbacks receive them.
        return {name: as_number(value) for name, value in results.items()}

    def predictor(self, model: keras.Model, passes: Passes, steps: int | None) -> Callable[[int], Structure]:
        """Returns the function of `Engine.predictor`; workers compute some batches ahead of the loop. Raises ConfigError for an unbuilt model."""
        if not model.built:
            raise ConfigError(
                f"Model {model.name!r} has no variables yet, and they are to be on the servers: give the model a keras.Input, or "
                "call its build(), in `with trainer.scope():`."
            )
        outputs: Iterator[Structure] | None = None

        def predict(count: int) -> Structure:
            nonlocal outputs
            if not isinstance(model.predict_function, Predictor):
                batches = list(itertools.islice(passes.iterator, count))
                return model.predict_function(batches) if batches else None
            outputs = outputs or model.predict_function.all_outputs(passes.iterator, steps)
            return concatenated(list(itertools.islice(outputs, count)))

        return predict

    def predict_batch(self, model: keras.Model, batch: Structure) -> Structure:
        return model.predict_function([batch])

    def drain(self, model: keras.Model) -> None:
        """Waits until all scheduled steps of `model` are counted."""
        drain_steps(model)

    def explaining_errors(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager that turns TensorFlow's error into a ClusterError that names the lost parameter server."""
        return self.scheduler.explain_errors()

    def peer_preempted(self) -> bool:
        """Returns whether a parameter server has received SIGTERM."""
        return self._preemption()

    def on_exit(self) -> None:
        """Sends the exit code of this process to the other tasks."""
        server.publish_exit_code(self.strategy.cluster)

    def own_step_ms(self, model: keras.Model, steps: int) -> Mapping[str, float]:
        """Implements `Engine.own_step_ms`: the time from the begin of a worker's step until the chief has its result. No collective."""
        function = model.train_function
        if not isinstance(function, Execution):
            return {}
        times = function.step_ms.take()
        if not steps or self.scheduler.workers == 1:
            return {}
        for task, ms in times.items():
            function.measured.add(f"perf/own_step_ms/{task.replace(':', '-')}", ms)
        return times

    def report(self, model: keras.Model) -> dict[str, Any]:
        """Returns `retried_steps`, `staleness`, and `bytes_per_server`: the size of the model's and its optimizers' variables on each server."""
        return {
            "retried_steps": self.scheduler.retried_steps,
            "staleness": self.scheduler.staleness.report(),
            "bytes_per_server": bytes_per_server(model),
        }


def update_on_servers(optimizer: keras.optimizers.Optimizer, row_updates_mode: str) -> None:
    """Makes the arithmetic of updates run on the server of each variable, so that only the gradient travels. In place.

    `assign_add` and `assign_sub` are atomic there. An `assign` of a value that is computed from the old value (SGD's momentum) is
    not: of two simultaneous assignments the later one wins.
    """
    if keras_internals.has_replaced_variable_update(optimizer):
        return
    deduplicate_rows_before_update(optimizer)
    row_updates.install(optimizer, row_updates_mode)
    update_step, weight_decay = keras_internals.variable_update_methods(optimizer)

    def on_server(gradient: Gradient, variable: tf.Variable, learning_rate: keras.Variable | float) -> None:
        with tf.device(variable.device):
            update_step(gradient, variable, learning_rate)

    def decay(variables: Any) -> None:
        for variable in variables:
            with tf.device(getattr(variable, "value", variable).device):
                weight_decay([variable])

    keras_internals.replace_variable_update(optimizer, on_server, decay)


class Predictor:
    """A model's `predict_function`."""

    def __init__(self, model: keras.Model, scheduler: Scheduler):
        self.model = model
        self.scheduler = scheduler

    @functools.cached_property
    def step(self) -> WorkerStep:
        """The model's `predict_step` on workers; the model must have its variables."""
        return WorkerStep(self.model, self.model.predict_step)

    def __call__(self, batches: Sequence[Structure]) -> Structure:
        """Returns the concatenated outputs of a list of batches."""
        return concatenated([next(self.outputs([batch], batch)) for batch in batches])

    def all_outputs(self, iterator: DataIterator, steps: int | None) -> Iterator[Structure]:
        """Returns the outputs of the batches of a pass, or of the first `steps`."""
        if isinstance(iterator, PipelinesIterator):
            traced = self.step.trace(iterator.element_spec)
            return map(traced.packed, iterator.run_all(self.step, traced, self.scheduler, steps))
        return self.outputs(itertools.islice(iterator, steps), iterator.element_spec)

    def outputs(self, batches: Iterable[Structure], spec: Spec) -> Iterator[Structure]:
        """Yields the outputs of batches in the order of the batches; workers compute some batches ahead."""
        traced = self.step.trace(spec)
        self.step.begin()
        ready: collections.deque[list[np.ndarray]] = collections.deque()
        flight = InFlight(self.scheduler, ready.append, ordered=True)
        for number, batch in enumerate(batches):
            inputs = self.step.step_inputs(0, 0, number)
            flight.add(functools.partial(self._run, traced, batch_splitting.without_optionals(batch), inputs))
            while ready:
                yield traced.packed(ready.popleft())
        flight.drain()
        while ready:
            yield traced.packed(ready.popleft())

    def _run(self, traced: TracedStep, batch: Any, inputs: tf.Tensor, worker: int) -> list[np.ndarray]:
        return self.step.call(traced, batch, inputs)


def concatenated(parts: Sequence[Structure]) -> Structure:
    """Returns the concatenated outputs of several batches; None without a batch."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(lambda *outputs: tf.concat(outputs, 0), *parts)
