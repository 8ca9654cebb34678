"""Error feedback: adds to each gradient the residual that earlier steps have not transmitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.requests import Exchange, RankContext
from tfdist.compression.base import StateSpec
from tfdist.compression.wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """A wrapper that adds the residual of earlier steps to each gradient (Seide et al. 2014; Karimireddy et al.,
    arXiv:1901.09847).

    At every step the sum of all totals so far, plus the sum of all ranks' residuals, is the sum of all gradients so far.

    Args:
        compressor: The compressor.

    Raises:
        ConfigError: `compressor` is not a compressor, or chooses by variable name.

    Examples:
        >>> from tfdist.compression import ErrorFeedback, TopK
        >>> ErrorFeedback(TopK(compress_ratio=0.01)).compressor.compress_ratio
        0.01
    """

    def state_specs(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        return (StateSpec("residual", shape), *self.compressor.state_specs(shape))

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        corrected = [value + residual for value, (residual, *_) in zip(values, states, strict=True)]
        reduced = yield from self.compressor.exchange(corrected, [state[1:] for state in states], member)
        residuals = [value - sent for value, sent in zip(corrected, reduced.contributions, strict=True)]
        return reduced._replace(
            states=[(residual, *state) for residual, state in zip(residuals, reduced.states, strict=True)]
        )
