"""Digits under TPUStrategy, on the cores of a TPU.

    tfdist train --config=digits_tpu --workdir=DIR

Never run by tfdist's own tests, which have no TPU. strategy.devices is the TPU's name or address.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits


def get_config() -> TrainConfig:
    config = digits.get_config()
    config.strategy.name = "tpu"
    return config
