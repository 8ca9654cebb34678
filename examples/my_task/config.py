"""The configuration of `my_task`. In the parent folder of `my_task`, run:

tfdist train --config=my_task/config.py --workdir=runs/my_task
"""

from tfdist.config import OptimizerConfig, StrategyConfig, TrainConfig


def get_config():
    return TrainConfig(
        task="my_task.task:MyTask",
        strategy=StrategyConfig("multi_worker_mirrored"),  # one process; more with --config.cluster.workers=2
        global_batch_size=64,
        epochs=5,
        optimizer=OptimizerConfig("adam"),
        learning_rate=1e-2,
    )
