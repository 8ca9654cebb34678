"""An MLP of 10.5 M parameters on random numbers, for benchmarks and byte counts.

    tfdist train --config=synthetic --workdir=DIR

Takes about 30 s on 2 cores; the loss means nothing.
"""

from tfdist.config import OptimizerConfig, TrainConfig
from tfdist.tasks import synthetic


def get_config() -> TrainConfig:
    return TrainConfig(
        task="synthetic",
        task_options=synthetic.Options(),
        global_batch_size=64,
        epochs=1,
        optimizer=OptimizerConfig("sgd"),
        learning_rate=0.01,
    )
