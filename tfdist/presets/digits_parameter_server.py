"""Digits with parameter servers: a chief, two workers and two servers on this machine.

    tfdist train --config=digits_parameter_server --workdir=runs/parameter_server

Half a minute on two cores; validation accuracy about 0.99 (the order of updates differs from run to run).
"""

from tfdist.config import ClusterConfig, StrategyConfig, TrainConfig
from tfdist.presets import digits


def get_config() -> TrainConfig:
    """Returns the configuration."""
    config = digits.get_config()
    config.strategy = StrategyConfig("parameter_server")
    config.cluster = ClusterConfig(workers=2, ps=2)
    return config
