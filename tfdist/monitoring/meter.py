"""What a part of `TensorBoard` measures between two writes."""

from __future__ import annotations

import abc

import keras


class Meter(abc.ABC):
    """Measures a training for `TensorBoard`, which calls these methods on every task. None of them may be a collective."""

    model: keras.Model
    is_chief: bool

    def begin(self, model: keras.Model, is_chief: bool) -> None:
        """Begins with a model, before its first step is traced.

        Args:
            model: The model.
            is_chief: Whether this task is the chief.
        """
        self.model, self.is_chief = model, is_chief

    def on_epoch_begin(self) -> None:  # noqa: B027 (not all need it)
        """Begins an epoch."""

    def on_step(self, step: int) -> None:  # noqa: B027
        """Takes note of an execution's end, of which `step` is the last step since the training's begin. Reads no tensors."""

    @abc.abstractmethod
    def read(self) -> dict[str, float | None]:
        """Returns a value for each tag, measured since the last call; None for one that cannot be measured."""
