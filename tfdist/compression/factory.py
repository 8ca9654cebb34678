"""A name or a `CompressionConfig` to a compressor."""

from __future__ import annotations

from typing import Any

from tfdist.compression.base import Compressor
from tfdist.compression.error_feedback import ErrorFeedback
from tfdist.compression.warmup import Warmup
from tfdist.config import COMPRESSORS, CompressionConfig, registry
from tfdist.errors import ConfigError


def create(compression: Any) -> Any:
    """Returns the compressor that is asked for, wrapped as its arguments say.

    Args:
        compression: A name of `tfdist.config.COMPRESSORS`, a `CompressionConfig`, a compressor, or None.

    Returns:
        A `Compressor`, or None for None and `"none"`.

    Raises:
        ConfigError: There is no such compressor, or an argument is out of range.
    """
    if compression is None or isinstance(compression, Compressor):
        return compression
    config = CompressionConfig(compression) if isinstance(compression, str) else compression
    if not isinstance(config, CompressionConfig):
        raise ConfigError(
            "compression must be a name, a CompressionConfig, a compressor or None. "
            f"Received: {type(compression).__name__}."
        )
    if faults := list(config.faults()):
        raise ConfigError(faults)
    if config.name == "none":
        return None
    arguments = config.arguments()
    feeds_back = arguments.pop("use_error_feedback", False)
    steps = arguments.pop("start_powerSGD_iter", 0) or arguments.pop("warmup_steps", 0)
    compressor = registry.resolve("compression", COMPRESSORS[config.name][0], {})(**arguments)
    if feeds_back:
        compressor = ErrorFeedback(compressor)
    return Warmup(compressor, steps) if steps else compressor
