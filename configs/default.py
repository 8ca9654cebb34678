"""Digits on one device; every other configuration starts from this one.

    tfdist train --config=configs/default.py --workdir=DIR

The same as the preset: `--config=default`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import default


def get_config() -> TrainConfig:
    return default.get_config()
