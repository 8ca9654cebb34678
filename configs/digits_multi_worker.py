"""Digits under MultiWorkerMirroredStrategy, in two processes of this machine.

    tfdist train --config=configs/digits_multi_worker.py --workdir=DIR

The same as the preset: `--config=digits_multi_worker`. Copy it, and change what it returns.
"""

from tfdist.config import ClusterConfig, OptimizerConfig, StrategyConfig, TrainConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        task="digits",
        strategy=StrategyConfig("multi_worker_mirrored"),
        cluster=ClusterConfig(workers=2),
        global_batch_size=64,
        epochs=10,
        optimizer=OptimizerConfig("adam"),
        learning_rate=3e-3,
    )
