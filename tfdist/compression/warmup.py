"""The first steps, in which gradients change fast, without compression."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.compression.base import NONE, Compressor, Slot
from tfdist.compression.exchange import Choice, Exchange, Member


class Warmup(Compressor):
    """Compresses from some step on.

    Args:
        compressor: What compresses then.
        steps: The number of updates without compression.
    """

    def __init__(self, compressor: Compressor, steps: int):
        self._compressor = compressor
        self.rows, self.suits_adaptive = compressor.rows, compressor.suits_adaptive
        self.begins = steps

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self._compressor.name}, {self.begins})"

    def slots(self, shape: tuple[int, ...]) -> tuple[Slot, ...]:
        return self._compressor.slots(shape)

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: Member
    ) -> Exchange:
        return (
            yield Choice(
                member.step < self.begins,
                lambda: NONE.exchange(values, states, member),
                lambda: self._compressor.exchange(values, states, member),
            )
        )
