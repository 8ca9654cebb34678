"""Digits under CentralStorageStrategy, on two virtual CPUs of one process.

    tfdist train --config=configs/digits_central_storage.py --workdir=DIR

The same as the preset: `--config=digits_central_storage`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_central_storage


def get_config() -> TrainConfig:
    return digits_central_storage.get_config()
