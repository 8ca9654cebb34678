"""A training with curves and backups. Arguments: strategy, output folder, options as JSON.

Options: `kills`, of each life the step at whose end the last worker kills itself; `steps_per_execution`; `profile_steps`.
"""

import json
import os
import pathlib
import signal
import sys

import tfdist
from tfdist.runtime.report import progress

out, options = pathlib.Path(sys.argv[2]), {"kills": [], "steps_per_execution": 1, "profile_steps": ""}
options |= json.loads(sys.argv[3])
trainer = tfdist.Trainer(sys.argv[1])

import keras  # noqa: E402 (the strategy comes first)

from tests.multiprocess import harness  # noqa: E402
from tests.multiprocess.models import line  # noqa: E402
from tfdist.monitoring import TensorBoard  # noqa: E402

KILL = dict(enumerate(options["kills"])).get(progress.restarts())


class Die(keras.callbacks.Callback):
    only_observes = True
    step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if self.step == KILL and trainer.task.index == trainer.num_replicas - 1:
            os.kill(os.getpid(), signal.SIGKILL)


with trainer.scope():
    model, x, y = line(keras)
    model.steps_per_execution = options["steps_per_execution"]
HPARAMS = {"optimizer": {"name": "sgd", "clipnorm": None}, "decay": 1.0, "nesterov": False}
history = trainer.fit(
    model,
    x,
    y,
    batch_size=10,
    shuffle=False,
    epochs=4,
    validation_data=(x[:20], y[:20]),
    verbose=0,
    callbacks=[
        tfdist.BackupAndRestore(out / "backup", save_freq=7),
        TensorBoard(
            out / "curves",
            "batch",
            hparams=HPARAMS,
            profile_steps=options["profile_steps"],
            gradient_norm=True,
            histogram_freq=1,
        ),
        Die(),
    ],
)
harness.store(out, trainer.task.index, {"history": history.history, "restarts": progress.restarts()})
