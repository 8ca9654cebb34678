"""Compressors between which a training chooses, and the guard of the one that it uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.collectives.requests import Exchange, RankContext
from tfdist.compression.base import NONE, Compressor
from tfdist.compression.cast import BF16
from tfdist.compression.error_feedback import ErrorFeedback
from tfdist.compression.int8 import Int8
from tfdist.compression.powersgd import PowerSGD

UNDECIDED = -1
_TOLERANCE = 1.05  # a less lossy compressor may make steps longer by this factor


@dataclasses.dataclass(frozen=True)
class Candidates(Compressor):
    """Compressors by their loss of information, the least first; `Reduction` uses one of them at a time.

    Attributes:
        compressors: The compressors. A single one is used as it is.
        guard: Whether `Reduction` checks the fidelity of the one in use (`fidelity.py`).
    """

    compressors: tuple[Compressor, ...]
    guard: bool = False

    @property
    def start_step(self) -> int:
        """The number of updates at the start that are not compressed."""
        return max(each.start_step for each in self.compressors)

    @property
    def supports_adaptive_optimizers(self) -> bool:
        """True if all of them work with adaptive optimizers such as Adam."""
        return all(each.supports_adaptive_optimizers for each in self.compressors)

    @property
    def description(self) -> str:
        """The names of all, for messages."""
        names = ", ".join(map(short_name, self.compressors))
        return f"{names} with guard" if len(self.compressors) == 1 else f"auto of {names}"

    def for_variable(self, name: str, shape: tuple[int, ...]) -> Compressor:
        """Returns the first one's compressor of a variable's gradient."""
        return self.compressors[0].for_variable(name, shape)

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        """Runs the first one's exchange."""
        return self.compressors[0].exchange(values, states, member)


_NAMES = {
    NONE: "none",
    BF16(): "bf16",
    Int8(): "int8",
    ErrorFeedback(PowerSGD(4)): "powersgd of rank 4",
    ErrorFeedback(PowerSGD(2)): "powersgd of rank 2",
}
AUTOMATIC = tuple(_NAMES)


def short_name(compressor: Compressor) -> str:
    """Returns the name of a compressor for messages, such as "int8"."""
    return _NAMES.get(compressor, compressor.description)


def worth_trying(exchange_seconds: Sequence[float], step_seconds: float) -> list[int]:
    """Returns the candidates, by index, whose steps must be measured to choose one; only 0 if none of them can save time.

    `exchange_seconds` are those of each candidate for all gradients by itself, and `step_seconds` those of a step with candidate 0.
    An exchange runs beside the backward pass, so a step becomes shorter by at most what its exchange does.
    """
    plain = exchange_seconds[0]
    if step_seconds - (plain - min(exchange_seconds)) >= step_seconds / _TOLERANCE:
        return [0]
    chosen = [0]
    for index, seconds in enumerate(exchange_seconds):
        if seconds < exchange_seconds[chosen[-1]]:
            chosen.append(index)
    return chosen


def least_lossy(step_seconds: Mapping[int, float]) -> int:
    """Returns the first candidate whose step takes at most 5 % more time than the fastest; `step_seconds` is by candidate."""
    limit = min(step_seconds.values()) * _TOLERANCE
    return min(index for index, seconds in step_seconds.items() if seconds <= limit)
