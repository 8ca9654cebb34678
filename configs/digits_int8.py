"""Digits in two processes of this machine, their gradients compressed: eight bits for each number: a quarter of the bytes.

    tfdist train --config=configs/digits_int8.py --workdir=DIR

The same as the preset: `--config=digits_int8`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_int8


def get_config() -> TrainConfig:
    return digits_int8.get_config()
