"""The interface between a Trainer and an engine, which trains under the Trainer's strategy."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfdist.aliases import Data, DataIterator, Logs, StepFunction, Structure
from tfdist.strategy import Strategy

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class Engine(abc.ABC):
    """The part of a Trainer that trains, evaluates and predicts models under one strategy.

    Attributes:
        strategy: The strategy.
        num_replicas: The number of replicas over all workers; the number of workers, if they are not in step.
        compressor: Compresses the gradients of attached models, or None.
        ranks: The tasks that train together; None for a model without a Trainer.
        nan_policy: The action after steps whose loss or gradient is not finite, as for `Trainer`.
    """

    strategy: Strategy
    num_replicas: int
    compressor: Any = None
    ranks: Any = None
    nan_policy: str = "ignore"

    @abc.abstractmethod
    def attach(self, model: keras.Model) -> None:
        """Sets the step functions of this engine on a model. In place; a second call changes nothing.

        Args:
            model: A model created in the strategy's scope.
        """

    @abc.abstractmethod
    def source(self, dataset: Data, steps: int | None) -> Any:
        """Returns the `DataSource` of a loop over a dataset of batches of the global size.

        Args:
            dataset: The dataset, or one that the strategy has distributed.
            steps: The number of batches of the dataset, or None if unknown.
        """

    @abc.abstractmethod
    def source_from_function(self, make: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> Any:
        """Returns the `DataSource` of a loop over the datasets that a function returns.

        Args:
            make: Returns the dataset of one input pipeline.
        """

    @abc.abstractmethod
    def source_from_stored(self, data: Data, start: int, steps: int | None) -> Any:
        """Returns the `DataSource` of a loop over data that are read from storage.

        Args:
            data: The `StoredData`.
            start: The first step, counted over all epochs.
            steps: The number of steps; None means endless epochs, for training.
        """

    def running(self, model: keras.Model) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a loop or a single step of an attached model.

        Args:
            model: The model.
        """
        return contextlib.nullcontext()

    @abc.abstractmethod
    def run(self, function: StepFunction, iterator: DataIterator, remaining_steps: int | None) -> Logs:
        """Runs an execution of up to `steps_per_execution` steps.

        Args:
            function: The model's `train_function` or `test_function`, which the user may have replaced.
            iterator: A pass over the data.
            remaining_steps: The number of remaining steps of the epoch or evaluation, or None if unknown.

        Returns:
            The logs of the last step, or None if the data have ended.
        """

    @abc.abstractmethod
    def run_batch(self, function: StepFunction, batch: Structure, is_whole: bool = True) -> Logs:
        """Runs a step on one batch. Returns the logs of the step.

        Args:
            function: As of `run`.
            batch: The batch.
            is_whole: Whether tensors are the batch of all replicas, of which each receives its part; else each receives all of them.
        """

    @abc.abstractmethod
    def epoch_logs(self, model: keras.Model, function: StepFunction, logs: Logs) -> Logs:
        """Returns the logs of an epoch or an evaluation.

        Args:
            model: The model.
            function: As of `run`.
            logs: The logs of the last step.
        """

    @abc.abstractmethod
    def predictor(self, model: keras.Model, passes: Any, steps: int | None) -> Callable[[int], Structure]:
        """Returns a function that takes a number of batches, and returns the joined outputs of up to so many; None if the data have ended.

        Args:
            model: The model.
            passes: The passes of the loop; `passes.iterator` exists when the function is called.
            steps: The number of batches of the loop, or None for all batches.
        """

    @abc.abstractmethod
    def predict_batch(self, model: keras.Model, batch: Structure) -> Structure:
        """Returns the outputs of one batch, which every replica of this process receives.

        Args:
            model: The model.
            batch: The batch, as for `predict_on_batch`.
        """

    def data_to_predict(self, model: keras.Model, data: Data) -> Structure:
        """Returns the data in the form in which `predict` passes them to a loop.

        Args:
            model: The model.
            data: The user's data.
        """
        return data

    def drain(self, model: keras.Model) -> None:  # noqa: B027 (by default there is nothing to do)
        """Waits until all steps in flight are counted.

        Args:
            model: The model of these steps.
        """

    def explaining_errors(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that turns TensorFlow's error for a lost task into an error that names the task."""
        return contextlib.nullcontext()

    def peer_preempted(self) -> bool:
        """Returns whether a task that this one needs, and that runs no steps, has received SIGTERM."""
        return False

    def on_exit(self) -> None:  # noqa: B027
        """Runs before this process ends without Python's cleanup."""

    def own_step_ms(self, model: keras.Model, steps: int) -> Mapping[str, float]:
        """Returns by task the mean milliseconds of a step since the last call, without waits for other tasks. A collective.

        Empty if they are unknown, or if one task trains.

        Args:
            model: The model.
            steps: The number of steps since the last call; 0 discards their times, and is no collective.
        """
        return {}

    def report(self, model: keras.Model) -> dict[str, Any]:
        """Returns the entries that this engine adds to a report.

        Args:
            model: The trained model.
        """
        return {}


class RunningMeans:
    """The means of an engine's measurements since the last `take`; safe in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, value: float) -> None:
        """Adds a value to a measure."""
        with self._lock:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        """Returns the mean of each measure that has a value, and clears all values."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: total / count for name, (total, count) in sums.items()}
