"""The built-in configurations, chosen by `--config=NAME`. No TensorFlow here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tfdist.config.cluster import ClusterConfig
from tfdist.config.compression import CompressionConfig
from tfdist.config.optimizer import OptimizerConfig
from tfdist.config.strategy import StrategyConfig
from tfdist.config.train import TrainConfig

_DEFAULT: Mapping[str, Any] = {"task": "digits", "global_batch_size": 64, "epochs": 10, "learning_rate": 3e-3}
_TWO_WORKERS: Mapping[str, Any] = {
    "strategy": StrategyConfig("multi_worker_mirrored"),
    "cluster": ClusterConfig(workers=2),
}
_SERVERS: Mapping[str, Any] = {
    "strategy": StrategyConfig("parameter_server"),
    "cluster": ClusterConfig(workers=2, ps=2),
}
_RATINGS: Mapping[str, Any] = {
    "task": "ratings",
    # Adagrad updates only the rows of a batch. Gradients of rows are small: Keras' initial 0.1 would divide them all equally.
    "optimizer": OptimizerConfig("adagrad", initial_accumulator_value=1e-7),
    "learning_rate": 0.1,
    "epochs": 6,
}


def _compressed(name: str, **options: Any) -> dict[str, Any]:
    return {**_TWO_WORKERS, "compression": CompressionConfig(name, **options)}


# Name to the fields of `TrainConfig` that differ from `default`. Each digits preset takes 15 to 30 s on 2 cores and reaches val_accuracy 0.97. The
# compressed ones show that compression works; on one machine it is not faster. The tests do not run digits_tpu, which needs a TPU.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "digits": {},
    "digits_bf16": _compressed("bf16"),
    "digits_central_storage": {"strategy": StrategyConfig("central_storage", "2")},
    "digits_int8": _compressed("int8"),
    "digits_mirrored": {"strategy": StrategyConfig("mirrored", "2")},
    "digits_multi_worker": _TWO_WORKERS,
    "digits_parameter_server": _SERVERS,
    "digits_powersgd": _compressed("powersgd", start_powerSGD_iter=20),
    "digits_topk": {
        **_compressed("topk", compress_ratio=0.1),
        "optimizer": OptimizerConfig("sgd", momentum=0.9),
        "learning_rate": 0.05,
    },
    "digits_tpu": {"strategy": StrategyConfig("tpu")},
    "ratings": _RATINGS,
    "ratings_parameter_server": {**_RATINGS, **_SERVERS},
    "synthetic": {"task": "synthetic", "epochs": 1, "optimizer": OptimizerConfig("sgd"), "learning_rate": 0.01},
}


def preset(name: str) -> TrainConfig:
    """Returns a new copy of the configuration of a preset."""
    return TrainConfig(**copy.deepcopy({**_DEFAULT, **PRESETS[name]}))
