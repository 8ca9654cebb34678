"""A custom training loop: it does what Keras' `fit` does around each step, and the user calls the step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import keras

from tfdist.compat import keras_loops
from tfdist.errors import ConfigError
from tfdist.replicas import batch_splitting


def batches(
    model: StepModel,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = 0,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    shuffle: bool = True,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
) -> Generator[Any, None, None]:
    """Yields each batch of a training, and calls the callbacks as `fit` does.

    Args:
        model: The step's model.
        x: As for `fit`, likewise the others.
        y: The targets.
        sample_weight: The weights of the examples.
        batch_size: Examples per step, over all replicas.
        epochs: The last epoch.
        verbose: Whether to show progress.
        callbacks: What is called.
        shuffle: Whether to shuffle arrays.
        initial_epoch: The first epoch, from 0.
        steps_per_epoch: Steps of an epoch.
    """
    strategy = model.distribute_strategy
    data = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size, "shuffle": shuffle}
    with strategy.running_method("fit"):
        loop = keras_loops.make_loop(strategy, **data, steps_per_epoch=steps_per_epoch)
        keras_loops.build_method(model)(iterator=loop)
    loop.reset()
    shown: dict[str, Any] = {
        "add_progbar": verbose != 0,
        "verbose": verbose,
        "epochs": epochs,
        "steps": loop.num_batches,
    }
    hooks = keras.callbacks.CallbackList(list(callbacks), add_history=True, model=model, **shown)
    model.stop_training = False
    model.make_train_function()
    hooks.on_train_begin()
    for epoch in range(keras_loops.initial_epoch(model) or initial_epoch, epochs):
        model.reset_metrics()
        hooks.on_epoch_begin(epoch)
        with loop.catch_stop_iteration():
            for begin, end, iterator in loop:
                hooks.on_train_batch_begin(begin)
                batch = next(iterator)
                if batch_splitting.is_over(batch, strategy):
                    raise StopIteration
                yield batch
                hooks.on_train_batch_end(end, model.logs)
                if model.stop_training:
                    break
        hooks.on_epoch_end(epoch, dict(model.logs))
        if model.stop_training:
            break
    hooks.on_train_end(model.logs)


class StepModel(keras.Model):
    """The Keras model that runs a function as its training step.

    Args:
        function: Takes a batch, and returns logs.
        uses: Models, layers, optimizers, metrics, seed generators and variables that it uses.

    Attributes:
        logs: What the last step has returned.
    """

    def __init__(self, function: Callable[[Any], dict[str, Any]], uses: list[Any]):
        super().__init__(name=getattr(function, "__name__", "step"))
        self.uses = uses
        self.function = function
        self.logs: dict[str, Any] = {}

    def train_step(self, data: Any) -> dict[str, Any]:
        """Runs the function.

        Raises:
            ConfigError: It returns something other than logs.
        """
        logs = self.function(data)
        if not isinstance(logs, dict):
            raise ConfigError(
                f"The step {self.name!r} must return logs, a dict of names to numbers. Received: {type(logs).__name__}."
            )
        return logs
