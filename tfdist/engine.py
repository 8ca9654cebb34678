"""What a Trainer asks of an engine: the way in which its strategy trains."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class Engine(abc.ABC):
    """Trains, evaluates and predicts models under one strategy, by Keras' own loops.

    Attributes:
        num_replicas: The number of replicas over all workers; of workers, if they are not in step.
        compressor: What sums the gradients of models that are attached with fewer bytes, or None.
        nan_policy: What becomes of steps that are not finite, as of `Trainer`.
    """

    num_replicas: int
    compressor: Any = None
    nan_policy: str = "ignore"

    @abc.abstractmethod
    def attach(self, model: keras.Model) -> None:
        """Gives a model the step functions of this engine. In place; again changes nothing.

        Args:
            model: Made in the strategy's scope.
        """

    @abc.abstractmethod
    def distribute(self, make: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> Any:
        """Returns what Keras' loops take for the data that a function makes.

        Args:
            make: Returns the dataset of one input pipeline.
        """

    def running(self, model: keras.Model) -> contextlib.AbstractContextManager[Any]:
        """Surrounds Keras' `fit` or `evaluate`, or a single step, of a model that is attached.

        Args:
            model: The model.
        """
        return contextlib.nullcontext()

    def predicting(self, model: keras.Model, steps: int | None) -> contextlib.AbstractContextManager[Any]:
        """Surrounds Keras' `predict` of a model that is attached.

        Args:
            model: The model.
            steps: How many batches, or None for all.
        """
        return contextlib.nullcontext()

    def data_to_predict(self, model: keras.Model, data: Any, steps: int | None) -> Any:
        """Returns data as `predict` is to be given them.

        Args:
            model: The model.
            data: What the user gave.
            steps: How many batches, or None for all.

        Raises:
            ConfigError: The data cannot end after so many steps.
        """
        return data

    def drain(self, model: keras.Model) -> None:  # noqa: B027 (by default there is nothing to do)
        """Waits until all steps that are under way are counted.

        Args:
            model: Whose steps.
        """

    def explaining_errors(self) -> contextlib.AbstractContextManager[Any]:
        """Turns what TensorFlow raises for a lost task into a sentence."""
        return contextlib.nullcontext()

    def peer_preempted(self) -> bool:
        """Whether a task that takes no part in the steps, and that this one cannot do without, has been told to go."""
        return False

    def on_exit(self) -> None:  # noqa: B027
        """Is called where this process ends without Python's own clearing up."""

    def report(self, model: keras.Model) -> dict[str, Any]:
        """Returns what a report says of this engine beside what it says of all.

        Args:
            model: Which was trained.
        """
        return {}


class RunningMeans:
    """The means of what an engine's executions measure, since they were last taken; safe in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, name: str, value: float) -> None:
        """Adds a value to a measure."""
        with self._lock:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float]:
        """Returns the mean of each measure that has a value, and begins anew."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: total / count for name, (total, count) in sums.items()}
