"""Makes configurations for the tests of this folder, and returns their faults."""

from __future__ import annotations

import pytest

from tfdist.config import (
    TrainConfig,
    validation,
    walk,
)
from tfdist.errors import ConfigError


def make(**fields):
    """Returns a configuration with these fields, prepared as the command does."""
    made = TrainConfig(**{"global_batch_size": 32, **fields})
    walk.make_floats(made)
    return made


def faults(checked):
    """Returns what `check` finds wrong with a configuration."""
    with pytest.raises(ConfigError) as raised:
        validation.check(checked)
    return raised.value.faults
