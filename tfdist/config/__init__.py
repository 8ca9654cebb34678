"""The configuration of a run: a dataclass for each group of fields, their validation, and the command line that sets them. No TensorFlow here."""

from tfdist.config.backup import BackupConfig
from tfdist.config.cluster import ClusterConfig
from tfdist.config.compression import COMPRESSORS, CompressionConfig
from tfdist.config.monitoring import MonitoringConfig
from tfdist.config.optimizer import OptimizerConfig
from tfdist.config.schedule import ScheduleConfig
from tfdist.config.strategy import Outer, StrategyConfig
from tfdist.config.strategy_traits import STRATEGIES, StrategyTraits
from tfdist.config.train import TrainConfig

__all__ = [
    "COMPRESSORS",
    "STRATEGIES",
    "BackupConfig",
    "ClusterConfig",
    "CompressionConfig",
    "MonitoringConfig",
    "OptimizerConfig",
    "Outer",
    "ScheduleConfig",
    "StrategyConfig",
    "StrategyTraits",
    "TrainConfig",
]
