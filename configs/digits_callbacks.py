"""Digits with a schedule of the learning rate, and with callbacks: two of Keras and one of this file.

    tfdist train --config=configs/digits_callbacks.py --workdir=DIR

Takes about 15 s on 2 cores; expect val_accuracy >= 0.97. Copy it, and change what it returns.
"""

from typing import Any

from tfdist.config import OptimizerConfig, ScheduleConfig, TrainConfig

# Each is a callback of Keras, or a class or a function of yours as package.module:name. The module is looked for in the current
# folder and in PYTHONPATH: in your copy it is the copy's own name, such as my_config:report.
CALLBACKS = """
    EarlyStopping(monitor=val_loss, patience=4, restore_best_weights=True);
    TerminateOnNaN();
    configs.digits_callbacks:report(every=2)
"""


def get_config() -> TrainConfig:
    return TrainConfig(
        task="digits",
        global_batch_size=64,
        epochs=10,
        # Arguments of the optimizer stand beside its name; those that are left out have Keras' defaults.
        optimizer=OptimizerConfig("adamw", weight_decay=0.01, weight_decay_exclude="bias,gamma,beta"),
        learning_rate=3e-3,
        # In the first epoch the rate rises from 0 to learning_rate. Then it falls to 5% of that, to the end of the run.
        schedule=ScheduleConfig("cosine", warmup_epochs=1, end=0.05),
        callbacks=CALLBACKS,
    )


def report(every: int = 1) -> Any:
    """Returns a callback that prints the learning rate.

    Args:
        every: Epochs from one line to the next.
    """
    import keras  # here, as mistakes in a configuration are found before TensorFlow is loaded

    class Report(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if (epoch + 1) % every == 0:
                print(f"epoch {epoch + 1}: learning rate {float(self.model.optimizer.learning_rate):.2g}")

    return Report()
