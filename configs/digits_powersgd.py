"""Digits in two processes of this machine, their gradients compressed: PowerSGD: thin matrices in place of gradients.

    tfdist train --config=configs/digits_powersgd.py --workdir=DIR

The same as the preset: `--config=digits_powersgd`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_powersgd


def get_config() -> TrainConfig:
    return digits_powersgd.get_config()
