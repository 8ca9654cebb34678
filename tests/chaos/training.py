"""A task of the job to which a schedule happens. Arguments: the strategy, the job's folder, its faults as JSON.

At each phase at which a fault will happen, the task that the fault names writes a file into `FOLDER/phases` and waits until the
harness has written another. What it trained is in `FOLDER/out/result.npz` in the end.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import tfdist
from tfdist.backup.storage import Storage
from tfdist.cluster import from_tf_config, greeting

kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
FAULTS = json.loads(sys.argv[3])
CLUSTER, TASK = from_tf_config(os.environ["TF_CONFIG"])
EXAMPLES, BATCH, EPOCHS = 320, 32, 3
_LONGEST_WAIT = 60.0  # seconds: the harness may be gone
counts: dict[str, int] = {}


def write(path: pathlib.Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def come_to(phase: str) -> None:
    """Waits for the fault that is to happen here, if there is one that has not."""
    counts[phase] = counts.get(phase, 0) + 1
    for number, fault in enumerate(FAULTS):
        place = folder / "phases" / str(number)
        here = (fault["phase"], fault["task"]) == (phase, str(TASK)) and counts[phase] >= fault["number"]
        if here and not place.with_suffix(".done").exists():
            write(place.with_suffix(".here"), str(os.getpid()))
            ends = time.monotonic() + _LONGEST_WAIT
            while not place.with_suffix(".done").exists() and time.monotonic() < ends:
                time.sleep(0.01)


def at(phase: str, function):
    """Returns a function that comes to a phase first."""

    def come_and_do(*args, **kwargs):
        come_to(phase)
        return function(*args, **kwargs)

    return come_and_do


write(folder / "phases" / f"{TASK}.port", CLUSTER.address(TASK).rpartition(":")[2])
# Called right before TensorFlow's server is started, after the preflight; by servers instead of it.
greeting.naming_port_owner = at("between", greeting.naming_port_owner)
Storage.write_part, Storage.write_manifest = at("saving", Storage.write_part), at("saving", Storage.write_manifest)
come_to("before")
backup = tfdist.BackupAndRestore(folder / "backup", save_freq=4)
trainer = tfdist.Trainer(kind, backup=backup, start_timeout=40)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

from tfdist.tasks import digits  # noqa: E402


class Phases(keras.callbacks.Callback):
    """Comes to the phases of the loops."""

    def on_train_batch_end(self, batch, logs=None):
        come_to("training")

    def on_test_batch_end(self, batch, logs=None):
        come_to("validation")


class Traced(keras.layers.Layer):
    """Comes to the phase in which a step is traced: with tensors, and not Keras' own."""

    def call(self, x):
        if not isinstance(x, keras.KerasTensor):
            come_to("tracing")
        return x


keras.utils.set_random_seed(3)
(x, y), validation = digits.load()
x, y, validation = x[:EXAMPLES], y[:EXAMPLES], (validation[0][:64], validation[1][:64])
with trainer.scope():
    layers = keras.layers
    hidden = [
        layers.Dense(64, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.Dropout(0.3),
    ]
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), Traced(), *hidden, layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
trainer.fit(
    model, x, y, batch_size=BATCH, epochs=EPOCHS, validation_data=validation, validation_batch_size=32, verbose=0,
    callbacks=[Phases()],
)  # fmt: skip
come_to("end")
if trainer.task == CLUSTER.chief:
    variables = [np.asarray(each) for each in [*model.variables, *model.optimizer.variables]]
    (folder / "out").mkdir(exist_ok=True)
    np.savez(folder / "out" / "new.npz", *variables, steps=np.asarray(model.optimizer.iterations))
    (folder / "out" / "new.npz").replace(folder / "out" / "result.npz")
trainer.save(model, folder / "out" / "model.keras")
