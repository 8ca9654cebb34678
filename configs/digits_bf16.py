"""Digits in two processes of this machine, their gradients compressed: bfloat16 on the wire: half the bytes.

    tfdist train --config=configs/digits_bf16.py --workdir=DIR

The same as the preset: `--config=digits_bf16`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_bf16


def get_config() -> TrainConfig:
    return digits_bf16.get_config()
