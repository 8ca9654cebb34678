"""Digits under MultiWorkerMirroredStrategy, in two processes of this machine.

    python -m tfdist.train --config=configs/digits_multi_worker.py --workdir=DIR

The same as the preset: `--config=digits_multi_worker`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import digits_multi_worker


def get_config() -> TrainConfig:
    return digits_multi_worker.get_config()
