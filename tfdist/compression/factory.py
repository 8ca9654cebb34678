"""Creates a compressor from a name or a `CompressionConfig`."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.compression.base import Compressor
from tfdist.compression.error_feedback import ErrorFeedback
from tfdist.compression.warmup import Warmup
from tfdist.config import CompressionConfig, validation
from tfdist.errors import ConfigError


def create(compression: Any) -> Any:
    """Returns the compressor for a configuration, with the wrappers that its arguments ask for.

    Args:
        compression: The name of a `CompressionConfig`, a `CompressionConfig`, a compressor, or None.

    Returns:
        A `Compressor`, or None for None and `"none"`.

    Raises:
        ConfigError: The compressor is unknown, or an argument is out of range.

    Examples:
        >>> import tfdist.compression
        >>> tfdist.compression.create(tfdist.CompressionConfig("int8", block=128)).block
        128
    """
    if compression is None or isinstance(compression, Compressor):
        return compression
    config = CompressionConfig(compression) if isinstance(compression, str) else compression
    if not isinstance(config, CompressionConfig):
        raise ConfigError(
            "compression must be a name, a CompressionConfig, a compressor or None. "
            f"Received: {type(compression).__name__}."
        )
    faults = list(validation.group_faults(config, "compression"))
    if faults:
        raise ConfigError(faults)
    if config.name == "none":
        return None
    arguments = config.all_options()
    cls = config.compressor_class()
    own_names = {field.name for field in dataclasses.fields(cls)}
    wrapper_options = {name: arguments.pop(name) for name in arguments.keys() - own_names}
    compressor = cls(**arguments)
    if wrapper_options.get("use_error_feedback"):
        compressor = ErrorFeedback(compressor)
    steps = wrapper_options.get("start_powerSGD_iter") or wrapper_options.get("warmup_steps")
    if steps:
        compressor = Warmup(compressor, steps)
    return compressor
