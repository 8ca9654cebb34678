"""Custom training steps: the user's loop calls the step, and the Trainer provides data, callbacks and backups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tfdist.aliases import Data, Structure
from tfdist.compat import optimizer_search
from tfdist.errors import ConfigError, format_value
from tfdist.training import loop, loops, single_steps
from tfdist.training.loop_context import LoopContext


class StepModel(keras.Model):
    """A Keras model whose `train_step` is a function. `logs` holds the logs of the last step."""

    def __init__(self, function: Callable[[Structure], dict[str, Any]], uses: list[object]):
        super().__init__(name=getattr(function, "__name__", "step"))
        self.uses = uses
        self.function = function
        self.logs: dict[str, Any] = {}

    def train_step(self, data: Structure) -> dict[str, Any]:
        """Runs the function. Raises ConfigError where it returns something other than logs."""
        logs = self.function(data)
        if not isinstance(logs, dict):
            raise ConfigError(
                f"The step {self.name!r} must return logs, a dict of names to numbers. Received: {type(logs).__name__}."
            )
        return logs


class Step:
    """A custom training step, made by `Trainer.step`.

        step = trainer.step(train, uses=[generator, discriminator, generator_optimizer, discriminator_optimizer])
        for batch in step.loop(dataset, epochs=3):
            logs = step(batch)

    A Keras model holds the function and the objects that it uses, so that gradients, compression, backups and callbacks work
    as in `fit`.

    Args:
        context: The context of the trainer's loops.
        function: The step: takes a replica's batch and returns its logs, a dict of names to numbers.
        uses: The models, optimizers and metrics that the step uses.

    Attributes:
        model: The Keras model that holds the function and `uses`.

    Raises:
        ConfigError: `function` is not callable, or `uses` is not a list or has no optimizer.
    """

    def __init__(self, context: LoopContext, function: Callable[[Structure], dict[str, Any]], uses: Sequence[object]):
        if not callable(function) or not isinstance(uses, (list, tuple)):
            raise ConfigError(
                "trainer.step takes a function and, as `uses`, a list of the objects that the function uses: "
                "trainer.step(train, uses=[model, optimizer]). "
                f"Received: {format_value(function)}, {format_value(uses)}."
            )
        self._context = context
        self.model = StepModel(function, list(uses))
        optimizers = optimizer_search.optimizers(self.model)
        if not optimizers:
            raise ConfigError(
                "uses must hold each optimizer that the step applies, besides its models, all made in trainer.scope(). "
                f"Received: {format_value(uses)}."
            )
        self.model.compile(optimizers[0], auto_scale_loss=False)
        context.attach(self.model, "step")

    def __call__(self, batch: Structure) -> dict[str, Any]:
        """Runs the step on every replica.

        Args:
            batch: A batch from `loop`: each replica receives its part. Or tensors or arrays: every replica of this process
                receives all of them, and each worker may pass different ones of the same size.

        Returns:
            The step's logs as numbers: the mean over the replicas, weighted by their numbers of examples.

        Raises:
            ConfigError: The strategy cannot run the step.
        """
        engine = self._context.engine
        with contextlib.ExitStack() as stack:
            if not self._context.is_at_work:  # `loop` has made the preparations of `stepping` already
                stack.enter_context(self._context.stepping(self.model))
            logs = single_steps.run(engine, self.model, "train_step", batch, reset_metrics=False, is_whole=False)
        self.model.logs = logs
        return logs

    def loop(
        self,
        x: Data,
        y: Data = None,
        *,
        epochs: int = 1,
        steps_per_epoch: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        **kwargs: Any,
    ) -> Iterator[Structure]:
        """Yields the batches of a training run. Call the step with each of them.

        Backups are taken as in `fit`: an interrupted loop restores the state of `uses` and resumes with the batch after the last
        backup. Callbacks are called as in `fit`, with the logs of the step's last call. To stop early, set
        `step.model.stop_training` on all ranks, or leave the loop.

        Args:
            x: As for `fit`: arrays, a dataset with batches of the global size, or a function `(tf.distribute.InputContext) ->
                tf.data.Dataset`. The step receives the same batch as a `train_step`: for arrays, `x` or `(x, y)`.
            y: The targets, if `x` is arrays.
            epochs: The number of epochs, `initial_epoch` included.
            steps_per_epoch: Steps of an epoch; required if the data are endless.
            callbacks: Keras callbacks.
            **kwargs: `batch_size`, `sample_weight`, `shuffle`, `initial_epoch` and `verbose` (0), as for `fit`.

        Raises:
            ClusterError: A task is lost, and the others cannot continue without it.
            ConfigError: The strategy cannot train on the data.
        """
        arguments = {
            "y": y,
            "epochs": epochs,
            "steps_per_epoch": steps_per_epoch,
            "callbacks": callbacks,
            "verbose": 0,
            **kwargs,
        }
        arguments = {"x": x, **{name: value for name, value in arguments.items() if value is not None}}
        with loops.training(self._context, self.model, arguments) as surroundings:
            yield from loop.steps(surroundings, self.model, **arguments)
