"""Two workers find a backup that one of them cannot use. Arguments: strategy, folder for the results, folder of the backups."""

import os
import pathlib
import sys

import tfdist
from tests.helpers.unprivileged import unprivileged
from tests.multiprocess import harness
from tfdist.backup import search
from tfdist.runtime.report import progress

trainer = tfdist.Trainer(sys.argv[1])

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

RANK, OUT, FOLDER = trainer.task.index, sys.argv[2], pathlib.Path(sys.argv[3], "backup")
NEWEST = FOLDER / "step-4-end"
search.PATIENCE = 1.0
os.environ.pop(progress.FOLDER)  # which only root may write to
x, y = np.zeros((32, 4), np.float32), np.ones((32, 1), np.float32)
barrier = trainer.strategy.engine.ranks.barrier


class Steps(keras.callbacks.Callback):
    """Notes the steps, and which folders there are at the first of them."""

    def __init__(self):
        super().__init__()
        self.steps, self.folders = 0, []

    def on_train_batch_begin(self, batch, logs=None):
        if not self.steps:
            self.folders = folders()
        self.steps += 1


def folders():
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def fit(epochs):
    """Returns the error, or the steps trained, and the folders at the first one and in the end."""
    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    with trainer.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    backup = tfdist.BackupAndRestore(FOLDER, 2, delete_checkpoint=False, save_before_preemption=False)
    steps = Steps()
    try:
        trainer.fit(model, x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[steps, backup], shuffle=False)
        said = steps.steps
    except (tfdist.BackupError, tfdist.ConfigError) as e:
        said = f"{type(e).__name__}: {e}"
    barrier()
    result = said, steps.folders, folders()
    barrier()
    return result


if RANK == 0:
    FOLDER.mkdir()
    FOLDER.chmod(0o777)  # for a worker without root's rights
barrier()
results = {"first": fit(1)}
mine = NEWEST / f"rank-{RANK}.index"
if RANK == 1:
    mine.chmod(0)
    with unprivileged():
        results["unreadable"] = fit(2)
    mine.chmod(0o644)
else:
    results["unreadable"] = fit(2)
if os.geteuid() == 0:
    if RANK == 0:
        os.chown(NEWEST / "shared.index", 12345, -1)
    barrier()
    results["another's"] = fit(2)
    if RANK == 0:
        os.chown(NEWEST / "shared.index", 0, -1)
if RANK == 1:
    data = NEWEST / "rank-1.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
barrier()
results["torn"] = fit(2)
harness.store(OUT, RANK, results)
