"""Digits under MirroredStrategy, on two virtual CPUs of one process.

    tfdist train --config=configs/digits_mirrored.py --workdir=DIR

The same as the preset: `--config=digits_mirrored`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_mirrored


def get_config() -> TrainConfig:
    return digits_mirrored.get_config()
