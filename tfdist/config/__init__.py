"""What a run can be told, how it is validated, and the command line that sets it. No TensorFlow here."""

from tfdist.config.backup import BackupConfig
from tfdist.config.cluster import ClusterConfig
from tfdist.config.compression import COMPRESSORS, CompressionConfig
from tfdist.config.optimizer import OptimizerConfig
from tfdist.config.strategy import STRATEGIES, StrategyConfig
from tfdist.config.train import TrainConfig

__all__ = [
    "COMPRESSORS",
    "STRATEGIES",
    "BackupConfig",
    "ClusterConfig",
    "CompressionConfig",
    "OptimizerConfig",
    "StrategyConfig",
    "TrainConfig",
]
