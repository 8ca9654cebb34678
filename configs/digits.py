"""Digits: a small CNN with BatchNorm and Dropout on 1437 real images, on one device.

    tfdist train --config=configs/digits.py --workdir=DIR

The same as the preset: `--config=digits`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits


def get_config() -> TrainConfig:
    return digits.get_config()
