"""A slot of an optimizer that is split over processes. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist.errors import ConfigError
from tfdist.sharding.pieces import Pieces, Range


@dataclasses.dataclass(eq=False)
class SplitSlot:
    """A slot of an optimizer of which each process holds a piece. It stands for the whole slot that Keras would create.

    Attributes:
        path: The path of the whole slot.
        shape: The shape of the whole slot.
        dtype: The type of the elements.
        pieces: The elements that each process holds.
        process: The number of this process.
        piece: The variable with this process's elements.
        read: Returns the whole slot, while all processes take part in a save; None otherwise.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    pieces: Pieces
    process: int
    piece: Any
    read: Callable[[SplitSlot], np.ndarray] | None = None

    @property
    def value(self) -> SplitSlot:
        """The slot itself, where Keras' variables have a variable of TensorFlow."""
        return self

    @property
    def own(self) -> Range:
        """The elements that this process holds."""
        return self.pieces.ranges[self.process]

    def assign(self, whole: Any) -> None:
        """Sets this process's piece to its elements of a whole value."""
        flat = np.reshape(np.asarray(whole), -1)
        self.piece.assign(flat[self.own.begin : self.own.end])

    def numpy(self) -> np.ndarray:
        """Returns the whole slot. Raises ConfigError unless this process has all of it, or all processes take part in a save."""
        if len(self.pieces.ranges) == 1:
            return np.reshape(self.piece.numpy(), self.shape)
        if self.read is None:
            raise ConfigError(
                f"{self.path} is split over the workers (shard_optimizer=True), so a worker cannot save it by itself: call "
                "trainer.save, model.save or model.save_weights on all workers, and give a callback that does to all of them."
            )
        return self.read(self)
