"""Digits under TPUStrategy, on the cores of a TPU.

    python -m tfdist.train --config=configs/digits_tpu.py --workdir=DIR

Never run by tfdist's own tests, which have no TPU. strategy.devices is the TPU's name or address.
"""

from configs import digits
from tfdist.config import TrainConfig


def get_config() -> TrainConfig:
    config = digits.get_config()
    config.strategy.name = "tpu"
    return config
