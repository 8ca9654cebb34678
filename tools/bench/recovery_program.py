"""One task of `tools.bench.recovery`. Arguments: output folder, options as JSON."""

import json
import os
import pathlib
import signal
import sys
import time

MOMENTS = {"started": time.time()}

import tfdist  # noqa: E402 (the clock comes first)

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
MODE, ROUNDS, STEPS, SAVE_FREQ = (OPTIONS[name] for name in ("what", "rounds", "steps", "save_freq"))
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
if MODE == "uploads":
    where = f"http://127.0.0.1:{OPTIONS['port']}"
    os.environ |= {
        "AWS_ENDPOINT_URL": where,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[RANK % len(cores)]})

import keras  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402

from tfdist import data  # noqa: E402
from tfdist.monitoring.throughput import Throughput  # noqa: E402
from tfdist.runtime.report import progress  # noqa: E402
from tfdist.training.trainer import Trainer  # noqa: E402

MOMENTS["imported"] = time.time()
trainer = Trainer("multi_worker_mirrored")
MOMENTS["connected"] = time.time()

BATCH = 32 * trainer.num_replicas
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((2048, 1024), np.float32), rng.integers(0, 10, 2048, np.int32)


class Stamp(keras.callbacks.Callback):
    """Notes when the state is put back, and the end of this life's first step; kills the last worker amid its first life."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def on_train_begin(self, logs=None):
        MOMENTS["begun"] = time.time()

    def on_epoch_begin(self, epoch, logs=None):
        MOMENTS.setdefault("restored", time.time())

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 1:
            MOMENTS["stepped"] = time.time()
        if MODE == "restart" and self.steps == 25 and not progress.restarts() and trainer.num_replicas - 1 == RANK:
            (FOLDER / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def memory():
    """Returns what this task, the other tasks and their spare hold, in MB."""
    found = {"spare RSS": 0.0, "spare PSS": 0.0, "all PSS": 0.0}
    spare = psutil.Process().parents()[1]  # the parent waits for this task
    for each in [*spare.parent().children(), *spare.children(recursive=True)]:
        words, held = each.cmdline(), each.memory_full_info()
        if each == spare:
            found |= {"spare RSS": held.rss / 1e6, "spare PSS": held.pss / 1e6}
        if "-SEc" not in words:  # the guardian
            found["all PSS"] += held.pss / 1e6
    return found


def fit(backup):
    clock = Throughput(BATCH)
    # A Trainer keeps the last backup that it was given.
    (trainer if backup else Trainer(trainer.strategy)).fit(
        model,
        lambda context: data.epochs((X, Y), context, BATCH, seed=1),
        steps_per_epoch=STEPS,
        epochs=1,
        verbose=0,
        callbacks=[clock, Stamp(), *([backup] if backup else [])],
    )
    return float(np.mean(clock.step_seconds))


with trainer.scope():
    width, layers = (256, 2) if MODE == "uploads" else (2048, 3)
    hidden = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((1024,)), *hidden, keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
MOMENTS["built"] = time.time()

if MODE == "restart":
    fit(tfdist.BackupAndRestore(FOLDER / "backup", SAVE_FREQ))
    results = {**MOMENTS, "killed": float((FOLDER / "killed").read_text()), "memory": memory()}
else:
    results = {"folder": [], "s3": []} if MODE == "uploads" else {"none": [], "backups": []}
    if MODE == "uploads" and trainer.is_chief:
        import s3fs

        s3fs.S3FileSystem().mkdir("backups")
    for number in range(ROUNDS + 1):
        for name, seconds in results.items():
            folder = f"s3://backups/{number}" if name == "s3" else FOLDER / f"backup-{number}"
            backup = tfdist.BackupAndRestore(folder, SAVE_FREQ) if name != "none" else None
            seconds.append(fit(backup))
            if backup:
                backup.delete()
    results = {name: seconds[1:] for name, seconds in results.items()}  # the first round compiles
if trainer.is_chief:
    (FOLDER / "results.json").write_text(json.dumps(results))
