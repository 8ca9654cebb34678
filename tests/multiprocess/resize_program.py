"""Trains with backups, and kills itself at a step. Arguments: strategy, output folder, devices of this process (or the replicas of
all workers, as `replicas=4`), the folder of the backups (`{rank}` stands for the rank), the compression (or `sharded`: the optimizer's
slots are split; or `rounded`: weights travel as bfloat16, too; or `local`: workers train alone), and the step, 0 for none. Without devices
the job is elastic, and only its last worker kills itself, once.

Stores the hashes of the weights and of the optimizer's variables, and the history.
"""

import hashlib
import json
import os
import signal
import sys
import time

os.environ["TF_NUM_INTRAOP_THREADS"] = "1"  # sums within a replica depend on it

import tfdist
from tests.multiprocess import harness
from tfdist.tasks import digits

name, out, devices, folder, compression, kill_at = sys.argv[1:]
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if "TF_CONFIG" in os.environ else 0
backup = tfdist.BackupAndRestore(
    folder.replace("{rank}", str(rank)), save_freq=1 if devices else 3, delete_checkpoint=False
)
compressions = {
    "none": None,
    "sharded": None,
    "local": None,
    "rounded": None,
    "powersgd": tfdist.CompressionConfig("powersgd", start_powerSGD_iter=0),
}
options = harness.transport() if name == "multi_worker_mirrored" else {}
if compression in ("sharded", "rounded"):
    options["shard_optimizer"] = True
if compression == "rounded":
    options["weights_dtype"] = "bfloat16"
if compression == "local":
    options |= {"sync_every": 6, "outer": tfdist.Outer(learning_rate=0.7, momentum=0.9)}
if devices:
    field, _, number = devices.rpartition("=")
    options[field or "devices"] = int(number)
trainer = tfdist.Trainer(name, backup=backup, compression=compressions[compression], **options)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

BATCH, EPOCHS = 60, 4  # 4 and 3 replicas divide it; the last batch is smaller
keras.utils.set_random_seed(1)
(X, Y), _ = digits.load()
X, Y = np.reshape(X[:500], (-1, 64)).astype(np.float32), Y[:500].astype(np.int32)
TARGETS = np.stack([Y, np.arange(len(Y))], 1)  # a class, and the number of the example


class NumbersOfExamples(keras.metrics.Metric):
    """The sum of the numbers of the examples that an epoch has used, and of their squares."""

    sums_examples = True

    def __init__(self, power, **kwargs):
        super().__init__(**kwargs)
        self.power = power
        self.total = self.add_weight(name="total", shape=(), initializer="zeros", dtype="float64")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.cast(y_true[:, 1], tf.float64) ** self.power))

    def result(self):
        return self.total


def loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


class KillsItself(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        fewer, seconds = os.environ.get("TFDIST_TEST_WAITS", "4 0.3").split()
        if not devices and len(trainer.cluster.tasks()) < int(fewer):
            time.sleep(float(seconds))  # so that a host can come back in the meantime
        if int(self.model.optimizer.iterations.numpy()) == int(kill_at):
            if not devices:
                if rank < 3 or os.path.exists(f"{out}-killed"):
                    return
                open(f"{out}-killed", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)


def digest(values):
    return [hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest() for value in values]


with trainer.scope():
    layers = [keras.layers.Dense(32), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Dropout(0.1)]
    model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
    metrics = [NumbersOfExamples(1, name="numbers"), NumbersOfExamples(2, name="squares")]
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=metrics)
history = trainer.fit(model, X, TARGETS, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[KillsItself()]).history
results = {
    "weights": digest(model.get_weights()),
    "optimizer": digest(np.asarray(variable.value) for variable in model.optimizer.variables),
    "history": json.dumps(history),
}
harness.store(out, trainer.task.index, results)
