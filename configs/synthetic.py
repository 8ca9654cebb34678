"""An MLP of 10.5 M parameters on random numbers, for benchmarks and byte counts.

    tfdist train --config=configs/synthetic.py --workdir=DIR

The same as the preset: `--config=synthetic`. Copy it, and change what it returns.
"""

from tfdist.config import TrainConfig
from tfdist.presets import synthetic


def get_config() -> TrainConfig:
    return synthetic.get_config()
