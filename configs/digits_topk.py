"""Digits in two processes of this machine, their gradients compressed: top-k: the largest tenth of each gradient, with SGD and momentum.

    tfdist train --config=configs/digits_topk.py --workdir=DIR

The same as the preset: `--config=digits_topk`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_topk


def get_config() -> TrainConfig:
    return digits_topk.get_config()
