"""One task of `tools.bench.ray_jobs`. Arguments: output folder, options as JSON."""

import json
import os
import pathlib
import statistics
import sys
import time

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[RANK % len(cores)]})

import tfdist  # noqa: E402 (TensorFlow counts the cores)

trainer = tfdist.Trainer("multi_worker_mirrored")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import psutil  # noqa: E402

from tfdist import data  # noqa: E402
from tfdist.monitoring.throughput import Throughput  # noqa: E402
from tfdist.runtime.report import progress  # noqa: E402

BATCH = 32 * trainer.num_replicas
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((2048, 256), np.float32), rng.integers(0, 10, 2048, np.int32)


class EndAfterLoss(keras.callbacks.Callback):
    """Trains until a worker is lost, and then one step."""

    def on_train_begin(self, logs=None):
        if not progress.restarts():
            ancestors = [process.pid for process in psutil.Process().parents()]
            (FOLDER / f"ancestors-{RANK}").write_text(" ".join(map(str, ancestors)))

    def on_train_batch_end(self, batch, logs=None):
        if progress.restarts():
            if trainer.is_chief:
                (FOLDER / "stepped").write_text(str(time.time()))
            self.model.stop_training = True


with trainer.scope():
    hidden = [keras.layers.Dense(256, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

clock = Throughput(BATCH)
callbacks = [clock]
epochs = 1
if OPTIONS["what"] == "loss":
    callbacks = [EndAfterLoss(), tfdist.BackupAndRestore(FOLDER / "backup", 10)]
    epochs = 1000
trainer.fit(
    model,
    lambda context: data.epochs((X, Y), context, BATCH, seed=1),
    steps_per_epoch=OPTIONS["steps"],
    epochs=epochs,
    verbose=0,
    callbacks=callbacks,
)
if trainer.is_chief and OPTIONS["what"] == "step":
    (FOLDER / "step").write_text(str(statistics.median(clock.step_seconds)))
