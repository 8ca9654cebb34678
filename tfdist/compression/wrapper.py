"""The base class of compressors that wrap another one."""

from __future__ import annotations

import dataclasses

from tfdist.compression.base import Compressor, RowCodec, StateSpec
from tfdist.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Wrapper(Compressor):
    """Base class of compressors that wrap another one; forwards everything that a subclass does not override."""

    compressor: Compressor

    def __post_init__(self) -> None:
        """Validates the arguments; the wrapped compressor must not choose by variable name."""
        super().__post_init__()
        inner = repr(self.compressor)
        if isinstance(self.compressor, Compressor):
            if type(self.compressor).for_variable is Compressor.for_variable:
                return
            inner = self.compressor.description
        raise ConfigError(
            f"{type(self).__name__} goes around a compressor, and inside of PerVariable. Received: {inner}."
        )

    @property
    def row_codec(self) -> RowCodec:
        """The encoding of gathered rows."""
        return self.compressor.row_codec

    @property
    def start_step(self) -> int:
        """The number of updates at the start that are not compressed."""
        return self.compressor.start_step

    @property
    def supports_adaptive_optimizers(self) -> bool:
        """True if the compressor works with adaptive optimizers such as Adam."""
        return self.compressor.supports_adaptive_optimizers

    @property
    def granularity(self) -> int:
        """The granularity in elements."""
        return self.compressor.granularity

    def state_specs(self, shape: tuple[int, ...]) -> tuple[StateSpec, ...]:
        """Returns the specs of the state for a value of this shape."""
        return self.compressor.state_specs(shape)
