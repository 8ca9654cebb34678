"""`predict` on the workers of a parameter-server cluster: batches are computed some ahead of Keras' loop."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.parameter_server.scheduler import InFlight, Scheduler
from tfdist.parameter_server.traced_step import TracedStep
from tfdist.parameter_server.worker_dataset import Pipelines, PipelinesIterator
from tfdist.parameter_server.worker_step import WorkerStep, without_optionals


class _Outputs:
    """A batch's outputs, where Keras' `predict` expects a batch."""

    def __init__(self, value: Any):
        self.value = value


class Predictor:
    """What `predict` calls for each execution; in a callback's own `model.predict`, too.

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
            given = self.step.step_inputs(0, 0, number)
            flight.add(functools.partial(self._run, traced, without_optionals(batch), given))
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

    def _run(self, traced: TracedStep, batch: Any, given: tf.Tensor, worker: int) -> list[np.ndarray]:
        return self.step.call(traced, batch, given)


class Predictions:
    """What `predict` iterates over.

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
