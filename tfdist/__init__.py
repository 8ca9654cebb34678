"""Keras 3 `model.fit` on every `tf.distribute` strategy.

Names are loaded when they are first used: `import tfdist` loads no TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "BackupAndRestore": "backup",
    "BackupError": "errors",
    "ClusterError": "errors",
    "ClusterSpec": "cluster",
    "CompressionConfig": "config",
    "ConfigError": "errors",
    "StrategyConfig": "config",
    "Task": "task",
    "TaskSpec": "cluster",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "create_strategy": "strategies",
    "distribute_optimizer": "optimizer",
    "find_cluster": "resolvers",
}

_WITH_KERAS = ("backup", "optimizer", "strategies", "trainer")

__all__ = [
    "BackupAndRestore",
    "BackupError",
    "ClusterError",
    "ClusterSpec",
    "CompressionConfig",
    "ConfigError",
    "StrategyConfig",
    "Task",
    "TaskSpec",
    "TrainConfig",
    "Trainer",
    "create_strategy",
    "distribute_optimizer",
    "find_cluster",
]

if TYPE_CHECKING:
    from tfdist.backup import BackupAndRestore
    from tfdist.cluster import ClusterSpec, TaskSpec
    from tfdist.config import CompressionConfig, StrategyConfig, TrainConfig
    from tfdist.errors import BackupError, ClusterError, ConfigError
    from tfdist.optimizer import distribute_optimizer
    from tfdist.resolvers import find_cluster
    from tfdist.strategies import create_strategy
    from tfdist.task import Task
    from tfdist.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    if _HOMES[name] in _WITH_KERAS:
        importlib.import_module("tfdist.keras_backend").check()
    return getattr(importlib.import_module(f"tfdist.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
