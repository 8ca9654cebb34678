"""Three `fit`s on one generator, with validations on another one. Arguments: strategy, output folder, step of the second `fit` at which it kills itself."""

import os
import pathlib
import signal
import sys

import tfdist
from tfdist.runtime.report import progress

strategy, out, kill = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
how = {"devices": 2} if strategy == "mirrored" else {}
trainer = tfdist.Trainer(strategy, backup=tfdist.BackupAndRestore(out / "backup", save_freq=2), **how)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

from tests.multiprocess import harness  # noqa: E402
from tests.multiprocess.waiting import wait_until  # noqa: E402


def batches(seed):
    """Yields batches of random numbers, which begin with the number of the batch."""
    rng = np.random.default_rng(seed)
    for number in range(10**6):
        x = rng.standard_normal((6, 3)).astype(np.float32)
        x[:, 0] = number
        yield x, x.sum(1, keepdims=True) / 10


class Watch(keras.callbacks.Callback):
    only_observes = True

    def __init__(self, kill):
        super().__init__()
        self.steps, self.kill = 0, kill

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.kill:
            wait_until((out / "backup/fit-2/step-2/manifest.json").exists, 60)  # written beside the steps
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(1)
with trainer.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "mse")
data, validation = batches(1), batches(2)
histories, steps = [], []
for number in range(3):
    watch = Watch(kill if number == 1 and not progress.restarts() else 0)
    history = model.fit(
        data,
        epochs=2,
        steps_per_epoch=3,
        validation_data=validation,
        validation_steps=2,
        verbose=0,
        callbacks=[watch],
    )
    histories.append(history.history)
    steps.append(watch.steps)
following = [model.predict(each, steps=1, verbose=0) for each in (data, validation)]
results = {"histories": histories, "steps": steps, "weights": model.get_weights(), "following": following}
harness.store(out, trainer.task.index, results)
