"""Keras 3 `model.fit` on every `tf.distribute` strategy.

Names are loaded on first use: `import tfdist` does not load TensorFlow.
"""

from __future__ import annotations

import importlib
import os
import sys

from tfdist.version import __version__ as __version__

# `typing` is not imported, because Ctrl-C is not handled before a command has imported this module.
TYPE_CHECKING = False

_HOMES = {
    "BackupAndRestore": "backup.callback",
    "BackupError": "errors",
    "ClusterError": "errors",
    "DataError": "errors",
    "Feature": "feature",
    "ClusterSpec": "cluster",
    "CompressionConfig": "config",
    "ConfigError": "errors",
    "Outer": "config",
    "StrategyConfig": "config",
    "Task": "tasks.base",
    "TaskSpec": "cluster",
    "TrainConfig": "config",
    "Trainer": "training.trainer",
    "create_strategy": "strategies.factory",
    "run": "training.run",
    "slow": "runtime.report.phase",
    "distribute_optimizer": "gradients.optimizer",
    "find_cluster": "cluster.resolvers.discovery",
    "total": "step.totals",
    "whole_batch": "step.whole_batch",
}

# With public names of their own.
_PACKAGES = ("cluster", "compression", "config", "data", "layers", "monitoring", "ray")
_WITH_KERAS = ("backup", "gradients", "step", "strategies", "training")

__all__ = [
    "BackupAndRestore",
    "BackupError",
    "ClusterError",
    "ClusterSpec",
    "CompressionConfig",
    "ConfigError",
    "DataError",
    "Feature",
    "Outer",
    "StrategyConfig",
    "Task",
    "TaskSpec",
    "TrainConfig",
    "Trainer",
    "create_strategy",
    "distribute_optimizer",
    "find_cluster",
    "run",
    "slow",
    "total",
    "whole_batch",
]

if TYPE_CHECKING:
    from typing import Any

    from tfdist.backup.callback import BackupAndRestore
    from tfdist.cluster import ClusterSpec, TaskSpec
    from tfdist.cluster.resolvers.discovery import find_cluster
    from tfdist.config import CompressionConfig, Outer, StrategyConfig, TrainConfig
    from tfdist.errors import BackupError, ClusterError, ConfigError, DataError
    from tfdist.feature import Feature
    from tfdist.gradients.optimizer import distribute_optimizer
    from tfdist.runtime.report.phase import slow
    from tfdist.step.totals import total
    from tfdist.step.whole_batch import whole_batch
    from tfdist.strategies.factory import create_strategy
    from tfdist.tasks.base import Task
    from tfdist.training.run import run
    from tfdist.training.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"tfdist.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tfdist' has no attribute {name!r}")
    if _HOMES[name].partition(".")[0] in _WITH_KERAS:
        importlib.import_module("tfdist.compat.keras_backend").check()
        importlib.import_module("tfdist.compat.keras_distribution").install()
    return getattr(importlib.import_module(f"tfdist.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if hasattr(sys.modules.get("keras"), "backend") and sys.modules["keras"].backend.backend() == "tensorflow":
    # `keras.distribution` must work before the Trainer, and so before this package loads Keras.
    importlib.import_module("tfdist.compat.keras_distribution").install()

if "TFDIST_PROGRESS" in os.environ:  # a launcher has started this process, and reads why it ends
    importlib.import_module("tfdist.runtime.report.ending").listen()
