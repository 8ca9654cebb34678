"""The built-in configurations, chosen by `--config=NAME`. No TensorFlow here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfdist.config.cluster import ClusterConfig
from tfdist.config.compression import CompressionConfig
from tfdist.config.optimizer import OptimizerConfig
from tfdist.config.strategy import StrategyConfig
from tfdist.config.train import TrainConfig


class Preset(NamedTuple):
    """A built-in configuration.

    Attributes:
        about: A one-line description.
        fields: The fields of `TrainConfig` that differ from the preset `default`, with their values.
    """

    about: str
    fields: Mapping[str, Any]

    def config(self) -> TrainConfig:
        """Returns a new copy of the configuration."""
        return TrainConfig(**copy.deepcopy({**_DEFAULT, **self.fields}))


_DEFAULT: Mapping[str, Any] = {"task": "digits", "global_batch_size": 64, "epochs": 10, "learning_rate": 3e-3}
_TWO_WORKERS: Mapping[str, Any] = {
    "strategy": StrategyConfig("multi_worker_mirrored"),
    "cluster": ClusterConfig(workers=2),
}
_RATINGS: Mapping[str, Any] = {
    "task": "ratings",
    # Adagrad updates only the rows of a batch. Gradients of rows are small: Keras' initial 0.1 would divide them all equally.
    "optimizer": OptimizerConfig("adagrad", initial_accumulator_value=1e-7),
    "learning_rate": 0.1,
    "epochs": 6,
}
_COMPRESSED = "Digits in two processes on this machine, with compressed gradients:"


def _compressed(name: str, **options: Any) -> dict[str, Any]:
    return {**_TWO_WORKERS, "compression": CompressionConfig(name, **options)}


# Each digits preset takes 15 to 30 s on 2 cores and reaches val_accuracy 0.97. The compressed ones show that compression
# works; on one machine it is not faster. The tests do not run digits_tpu, which needs a TPU.
PRESETS: Mapping[str, Preset] = {
    "default": Preset("Digits on one device; every other configuration starts from this one.", {}),
    "digits": Preset("Digits: a small CNN with BatchNorm and Dropout on 1437 real images, on one device.", {}),
    "digits_bf16": Preset(f"{_COMPRESSED} bfloat16, half the bytes.", _compressed("bf16")),
    "digits_central_storage": Preset(
        "Digits under CentralStorageStrategy, on two virtual CPUs of one process.",
        {"strategy": StrategyConfig("central_storage", "2")},
    ),
    "digits_int8": Preset(f"{_COMPRESSED} int8, a quarter of the bytes.", _compressed("int8")),
    "digits_mirrored": Preset(
        "Digits under MirroredStrategy, on two virtual CPUs of one process.",
        {"strategy": StrategyConfig("mirrored", "2")},
    ),
    "digits_multi_worker": Preset(
        "Digits under MultiWorkerMirroredStrategy, in two processes on this machine.", _TWO_WORKERS
    ),
    "digits_parameter_server": Preset(
        "Digits with parameter servers: a chief, two workers and two servers on this machine.",
        {"strategy": StrategyConfig("parameter_server"), "cluster": ClusterConfig(workers=2, ps=2)},
    ),
    "digits_powersgd": Preset(
        f"{_COMPRESSED} PowerSGD, two low-rank matrices instead of each gradient.",
        _compressed("powersgd", start_powerSGD_iter=20),
    ),
    "digits_topk": Preset(
        f"{_COMPRESSED} top-k, the largest tenth of each gradient; SGD with momentum.",
        {
            **_compressed("topk", compress_ratio=0.1),
            "optimizer": OptimizerConfig("sgd", momentum=0.9),
            "learning_rate": 0.05,
        },
    ),
    "digits_tpu": Preset("Digits under TPUStrategy, on the cores of a TPU.", {"strategy": StrategyConfig("tpu")}),
    "ratings": Preset("A recommender on ratings whose best reachable error, 0.5, is known, on one device.", _RATINGS),
    "ratings_parameter_server": Preset(
        "A recommender whose tables are on two parameter servers: a chief, two workers and two servers on this machine.",
        {**_RATINGS, "strategy": StrategyConfig("parameter_server"), "cluster": ClusterConfig(workers=2, ps=2)},
    ),
    "synthetic": Preset(
        "An MLP of 10.5 M parameters on random numbers, for benchmarks and byte counts.",
        {"task": "synthetic", "epochs": 1, "optimizer": OptimizerConfig("sgd"), "learning_rate": 0.01},
    ),
}
