"""Trains a model whose variables live as pieces, with backups. Arguments: strategy, output folder, the mesh, a case of
`model_parallel_program`, a folder of backups, a signal and the rank that receives it, as `SIGTERM-1`, or nothing, and the number of epochs.
`stock` is Keras without backups.

Stores the weights and slots, and the steps that were trained.
"""

import os
import pathlib
import signal

from tests.multiprocess import harness, model_parallel_program
from tests.multiprocess.model_parallel_program import ROWS, TARGETS, build, chosen, out, shape, strategy

import tfdist  # isort: skip

import keras  # isort: skip
import numpy as np  # isort: skip

if strategy == "one_device":
    model_parallel_program.trainer = tfdist.Trainer(strategy)
trainer = model_parallel_program.trainer
case, folder, interruption, epochs = chosen
sent, _, receiver = interruption.partition("-")
FREQUENCY, STOP = 3, 7
mark = pathlib.Path(out, "sent")


class Count(keras.callbacks.Callback):
    """Counts steps, and sends the signal to this process after some, once."""

    only_observes = True
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == STOP and sent and trainer.task.index == int(receiver) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.Signals[sent])


def train():
    model, data = build(case)
    steps = Count()
    callbacks = [steps]
    if trainer:
        frequency = FREQUENCY if sent == "SIGKILL" else "epoch"
        callbacks.append(tfdist.BackupAndRestore(folder, save_freq=frequency, delete_checkpoint=False))
    code = 0
    try:
        model.fit(data, TARGETS, batch_size=ROWS, epochs=int(epochs), verbose=0, shuffle=False, callbacks=callbacks)
    except SystemExit as e:
        code = e.code
    # No worker can read a slot of which others hold ranges.
    slots = [] if shape == "slots" else [np.array(variable) for variable in model.optimizer.variables]
    return {"code": code, "steps": steps.steps, "weights": model.get_weights(), "slots": slots}


if __name__ == "__main__":
    harness.store(out, trainer.task.index if trainer else 0, train())
