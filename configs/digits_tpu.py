"""Digits under TPUStrategy, on the cores of a TPU.

    tfdist train --config=configs/digits_tpu.py --workdir=DIR

The same as the preset: `--config=digits_tpu`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_tpu


def get_config() -> TrainConfig:
    return digits_tpu.get_config()
