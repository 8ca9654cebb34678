"""Digits in two processes of this machine, their gradients compressed: eight bits for each number: a quarter of the bytes.

    python -m tfdist.train --config=configs/digits_int8.py --workdir=DIR

Takes about 30 s on 2 cores; expect val_accuracy >= 0.97. On one machine it shows that it works, not that it is faster.
"""

from configs import digits_multi_worker
from tfdist.config import TrainConfig


def get_config() -> TrainConfig:
    config = digits_multi_worker.get_config()
    config.compression.name = "int8"
    return config
