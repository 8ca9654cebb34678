"""Warm-up: the first steps, in which gradients change fast, are not compressed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.requests import Cond, Exchange, RankContext
from tfdist.compression.base import NONE
from tfdist.compression.wrapper import Wrapper
from tfdist.config.constraints import option


@dataclasses.dataclass(frozen=True)
class Warmup(Wrapper):
    """A wrapper that compresses after the first `steps` updates.

    Args:
        compressor: The compressor after these updates.
        steps: The number of updates without compression.

    Raises:
        ConfigError: `compressor` is not a compressor, or chooses by variable name; or `steps` is negative.

    Examples:
        >>> from tfdist.compression import TopK, Warmup
        >>> Warmup(TopK(), 100).start_step
        100
    """

    steps: int = option(0, "0 or more", lambda steps: steps >= 0)

    @property
    def start_step(self) -> int:
        return self.steps

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        return (
            yield Cond(
                member.step < self.steps,
                lambda: NONE.exchange(values, states, member),
                lambda: self.compressor.exchange(values, states, member),
            )
        )
