"""The interface of a feature: a part of training that stands in one file, and that the step, the backup and the reports call in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tfdist.aliases import Gradient, Json, Structure, Variables

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


@dataclasses.dataclass
class RunningStep:
    """A step that is traced, or runs eagerly.

    Attributes:
        model: The model.
        trains: Whether the step trains; else it evaluates.
        data: The batch, in a part for each replica of this process.
        counts: The number of examples of each replica, if batches may not give each replica the same number; else None.
        examples: Returns the number of examples of this process's first replica; 1 if batches have no axis of examples.
    """

    model: keras.Model
    trains: bool
    data: Structure
    counts: Structure
    examples: Callable[[], Any]


class Feature:
    """A feature of the strategies whose replicas train in step.

    A strategy has an object of each class in `FEATURES` (`config/features.py`) whose `asks` returns True, and of each class that the option
    `features` names. The engine calls their methods in that order; around an execution or a step the first feature is the outermost. Each
    method does nothing by default.

    Attributes:
        name: The name in `FEATURES`, by which backups hold the feature's state.
        after: The names of the features that come before this one, if the strategy has them.
        trains_alone: Whether each worker applies the gradients of its own examples.
        splits_state: Whether workers hold parts of the weights or of the optimizer's state.
        strategy: The strategy.

    Examples:
        >>> from tfdist.feature import Feature
        >>> class CountSteps(Feature):
        ...     steps = 0
        ...     def step(self, step, run):
        ...         self.steps += 1  # in a trace, not in each step
        ...         run()
    """

    name: str = ""
    after: ClassVar[Sequence[str]] = ()
    trains_alone: ClassVar[bool] = False
    splits_state: ClassVar[bool] = False

    def __init__(self, strategy: Any):
        self.strategy = strategy

    @classmethod
    def asks(cls, strategy: Any) -> bool:
        """Returns whether the options of a strategy ask for the feature. Called when the strategy gets its options, with or without a GPU."""
        return True

    def attach_model(self, model: keras.Model, engine: Any) -> None:
        """Changes a compiled model in place, before its first step. Called on all tasks, again for each new function of the model.

        Raises:
            ConfigError: The feature cannot train the model.
        """

    def needs_assigned(self, model: keras.Model) -> bool:
        """Returns whether `set_assigned` must be called before the first training step of a built model."""
        return False

    def set_assigned(self, model: keras.Model, weights: Sequence[keras.Variable]) -> None:
        """Takes the weights that a training step assigns, and for which no optimizer gets a gradient. Eager, on all tasks."""

    def needs_update(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> bool:
        """Returns whether the optimizer must update through `AccumulatingUpdate` even with one replica."""
        return False

    def attach(self, model: keras.Model, optimizer: keras.optimizers.Optimizer, engine: Any) -> None:
        """Changes an optimizer of a model in place, after `attach_model`. A second call for the same optimizer changes nothing.

        Args:
            model: The model.
            optimizer: The outermost optimizer, such as a `LossScaleOptimizer`. Its gradients are distributed already.
            engine: The `Engine`, with the options of the Trainer.
        """

    def execute(self, execution: Any, run: Callable[[], Structure]) -> Structure:
        """Calls `run`, which runs an execution of one or several steps, and returns its result. Eager, on all tasks; may call collectives.

        Args:
            execution: The `Execution`.
            run: Runs the execution with the features that follow.
        """
        return run()

    def step(self, step: RunningStep, run: Callable[[], None]) -> None:
        """Calls `run`, which runs a step on all replicas. In the graph of the step, in cross-replica context; may call collectives.

        Args:
            step: The step.
            run: Runs the replicas with the features that follow.
        """
        run()

    def reduced(
        self, optimizer: keras.optimizers.Optimizer, grads: Sequence[Gradient], variables: Variables
    ) -> Sequence[Gradient]:
        """Returns the reduced gradients of an optimizer, before they are accumulated, clipped and applied.

        In the graph of a step, on each replica; may not call collectives. With a split optimizer each process has its pieces of the
        gradients. A loss scale is contained.
        """
        return grads

    def logs(self, model: keras.Model) -> Mapping[str, tf.Tensor]:
        """Returns numbers that the logs of a training step show beside the model's: scalars, equal or averaged over the replicas.

        In the graph of a step, on each replica, after the model's own step.
        """
        return {}

    def sum_over_pieces(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a value over the workers that hold other pieces of the model than this one. In the graph of a step; a collective."""
        return value

    def state(self) -> Json:
        """Returns the state that a backup holds, beside all variables: values of JSON, equal on all tasks; None without one."""
        return None

    def restore(self, state: Json) -> None:
        """Restores a value of `state`; None if the backup holds none."""

    def summary(self, model: keras.Model, workers: int) -> dict[str, Any]:
        """Returns entries of `summary.json`, at the end of a training. Called on all tasks; not a collective.

        Args:
            model: The trained model.
            workers: The number of workers.
        """
        return {}
