"""Trains with compressors to choose from: one whose exchange is slow, and one that returns 0.9 of the sum. Arguments: strategy, output
folder, the step after which worker 1 kills itself at its first start, and the number of steps in an execution.
"""

import dataclasses
import os
import pathlib
import signal
import sys
import time

import tfdist
from tests.multiprocess import harness
from tfdist.compression.base import NONE, NoCompression
from tfdist.compression.candidates import Candidates

name, out, kill_after, per_execution = sys.argv[1:]

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

STEPS = 250


def late(value):
    time.sleep(0.05)
    return value


@dataclasses.dataclass(frozen=True)
class Late(NoCompression):
    """Sends each number 0.05 s late."""

    def exchange(self, values, states, member):
        waited = [tf.ensure_shape(tf.numpy_function(late, [value], tf.float32), value.shape) for value in values]
        return (yield from NONE.exchange(waited, states, member))


@dataclasses.dataclass(frozen=True)
class Short(NoCompression):
    """Returns 0.9 of the sum, whose cosine with the sum is 1."""

    def exchange(self, values, states, member):
        reduced = yield from NONE.exchange(values, states, member)
        return reduced._replace(sums=[0.9 * total for total in reduced.sums])


trainer = tfdist.Trainer(name, compression=Candidates((Late(), Short()), guard=True), transport="tcp")

import keras  # noqa: E402 (the strategy comes first)

from tfdist.gradients.optimizer import get_reduction  # noqa: E402

used = []


class Record(keras.callbacks.Callback):
    """Lists the compressor after each execution, and ends the process."""

    only_observes = True

    def on_train_batch_end(self, batch, logs=None):
        used.append((batch + 1, type(get_reduction(self.model.optimizer).compressor).__name__))
        mark = pathlib.Path(out, "killed")
        if trainer.task.index == 1 and batch + 1 == int(kill_after) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


rng = np.random.default_rng(0)
x = rng.normal(size=(4 * STEPS, 64)).astype(np.float32)
y = rng.normal(size=(4 * STEPS, 1)).astype(np.float32)
keras.utils.set_random_seed(1)
with trainer.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", steps_per_execution=int(per_execution))
backup = tfdist.BackupAndRestore(os.path.join(out, "backup"), save_freq=10)
trainer.fit(model, x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[Record(), backup])
reduction = get_reduction(model.optimizer)
results = {
    "weights": model.get_weights(),
    "used": used,
    "selection": reduction.stored_selection,
    "measures": reduction.measures._asdict(),
}
harness.store(out, trainer.task.index, results)
