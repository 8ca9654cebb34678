"""Digits in two processes of this machine, their gradients compressed: top-k: the largest tenth of each gradient, with SGD and momentum.

    tfdist train --config=digits_topk --workdir=DIR

Takes about 30 s on 2 cores; expect val_accuracy >= 0.97. On one machine it shows that it works, not that it is faster.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_multi_worker


def get_config() -> TrainConfig:
    config = digits_multi_worker.get_config()
    config.compression.name = "topk"
    config.compression.compress_ratio = 0.1
    config.optimizer.name = "sgd"
    config.optimizer.momentum = 0.9
    config.learning_rate = 0.05
    return config
