"""A choice of compressors by variable name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.collectives.requests import Exchange, RankContext
from tfdist.compression.base import NONE, Compressor
from tfdist.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class PerVariable(Compressor):
    """A choice of compressors by variable name: the first matching rule applies. Must be the outermost wrapper.

    Args:
        rules: Maps regular expressions, searched in a variable's path such as `"dense/kernel"`, to compressors; None means no
            compression. A variable that matches a rule is compressed even if it is small.
        default: For all other variables; None means no compression.

    Raises:
        ConfigError: A key is not a regular expression, or a value is neither a compressor nor None.

    Examples:
        >>> from tfdist.compression import Int8, PerVariable, TopK
        >>> PerVariable({"embedding": TopK()}, default=Int8()).default.block
        256
    """

    rules: Mapping[str, Compressor | None]
    default: Compressor | None = None

    def __post_init__(self) -> None:
        faults = []
        for pattern, compressor in [*self.rules.items(), ("default", self.default)]:
            if not (compressor is None or isinstance(compressor, Compressor)):
                faults.append(f"PerVariable: {pattern!r} must have a compressor or None. Received: {compressor!r}.")
            try:
                re.compile(pattern)
            except re.error as e:
                faults.append(f"PerVariable: {pattern!r} is no regular expression: {e}.")
        if faults:
            raise ConfigError(faults)

    def _all(self) -> list[Compressor]:
        return [compressor for compressor in (self.default, *self.rules.values()) if compressor not in (None, NONE)]

    @property
    def start_step(self) -> int:
        return min((compressor.start_step for compressor in self._all()), default=0)

    @property
    def supports_adaptive_optimizers(self) -> bool:
        return all(compressor.supports_adaptive_optimizers for compressor in self._all())

    @property
    def description(self) -> str:
        rules = {pattern: (compressor or NONE).description for pattern, compressor in self.rules.items()}
        return f"PerVariable({rules}, {(self.default or NONE).description})"

    def for_variable(self, name: str, shape: tuple[int, ...]) -> Compressor:
        for pattern, compressor in self.rules.items():
            if re.search(pattern, name):
                return compressor or NONE
        return (self.default or NONE).for_variable(name, shape)

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: RankContext
    ) -> Exchange:
        raise NotImplementedError(
            "PerVariable has no exchange: `for_variable` returns the compressor of each variable."
        )
