"""Digits with parameter servers: a chief, two workers and two servers on this machine.

    tfdist train --config=configs/digits_parameter_server.py --workdir=DIR

The same as the preset: `--config=digits_parameter_server`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_parameter_server


def get_config() -> TrainConfig:
    return digits_parameter_server.get_config()
