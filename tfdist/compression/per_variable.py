"""Another compressor for some variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.compression.base import NONE, Compressor
from tfdist.compression.exchange import Exchange, Member
from tfdist.errors import ConfigError


class PerVariable(Compressor):
    """Chooses by a variable's name; of the rules that fit, the first one counts. Outside of all other wrappers.

    Args:
        rules: Regular expressions, which are searched in a variable's path as `"dense/kernel"`, to compressors; None means no
            compression. What a rule names is compressed even if it is small.
        default: For all other variables; None means no compression.
    """

    def __init__(self, rules: Mapping[str, Compressor | None], default: Compressor | None = None):
        self._rules = [(re.compile(pattern), compressor or NONE) for pattern, compressor in rules.items()]
        self._default = default or NONE
        compressors = [self._default, *(compressor for _, compressor in self._rules)]
        self.begins = min((c.begins for c in compressors if c is not NONE), default=0)
        self.suits_adaptive = all(c.suits_adaptive for c in compressors)

    @property
    def name(self) -> str:
        rules = {pattern.pattern: compressor.name for pattern, compressor in self._rules}
        return f"{type(self).__name__}({rules}, {self._default.name})"

    def of(self, name: str, shape: tuple[int, ...]) -> Compressor:
        named = (compressor for pattern, compressor in self._rules if pattern.search(name))
        return next(named, None) or self._default.of(name, shape)

    def exchange(
        self, values: Sequence[tf.Tensor], states: Sequence[tuple[tf.Tensor, ...]], member: Member
    ) -> Exchange:
        raise ConfigError("PerVariable goes outside of ErrorFeedback and Warmup: give it these as its compressors.")
