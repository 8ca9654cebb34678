"""One task of `tools.bench.tables`. Arguments: output folder, options as JSON."""

import contextlib
import gc
import json
import pathlib
import statistics
import sys
import time

import tfdist

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
trainer = tfdist.Trainer("one_device", row_updates="lazy")

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

COLUMNS, BATCH, IDS, STEPS = 16, 64, 8, 30
OPTIMIZERS = {"adagrad": keras.optimizers.Adagrad, "adam": keras.optimizers.Adam}


class Clock(keras.callbacks.Callback):
    """The seconds of each step."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self.begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.begin)


def make(system, rows):
    scope = trainer.scope() if system == "tfdist" else contextlib.nullcontext()
    with scope:
        model = keras.Sequential(
            [
                keras.Input((IDS,), dtype="int32"),
                keras.layers.Embedding(rows, COLUMNS),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(OPTIMIZERS[OPTIONS["optimizer"]](0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def step_ms(model, rows):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, (STEPS * BATCH, IDS), np.int32)
    labels = (ids.sum(1) % 2).astype(np.float32)
    clock = Clock()
    model.fit(ids, labels, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[clock])
    return statistics.median(clock.seconds) * 1000


samples = {name: [] for name, _, _ in OPTIONS["contenders"]}
for _ in range(OPTIONS["rounds"]):
    for name, system, rows in OPTIONS["contenders"]:
        model = make(system, rows)
        step_ms(model, rows)  # compiles
        samples[name].append(step_ms(model, rows))
        del model
        gc.collect()
(FOLDER / "results.json").write_text(json.dumps({"samples": samples}))
