"""Trains with `audit_every`, and prints the audits, the false alarms (an error ends it) and the cost of an audit.

    tfdist launch --workers=2 -- python tools/audit_steps.py 10000
    tfdist launch --workers=2 -- python tools/audit_steps.py 200 100 1024    # every 100 steps, layers of 1,024 units

Arguments: the steps, the steps between two audits (1), the units of the layers (16).
"""

from __future__ import annotations

import sys
import time

import tfdist

steps, every, units = (int(word) for word in [*sys.argv[1:], "1", "16"][:3])
trainer = tfdist.Trainer("multi_worker_mirrored", audit_every=every)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402


class Clock(keras.callbacks.Callback):
    """Collects the seconds of each step."""

    def on_train_begin(self, logs=None):
        self.seconds = []
        self.done = trainer.strategy.audit.done
        self.audited = []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        seconds = time.perf_counter() - self.begun
        done = trainer.strategy.audit.done
        (self.audited if done > self.done else self.seconds).append(seconds)
        self.done = done


keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(64 * 32, units)).astype("float32")
y = rng.normal(size=(64 * 32, 1)).astype("float32")
layers = keras.layers
with trainer.scope():
    hidden = [[layers.Dense(units, "relu"), layers.BatchNormalization(), layers.Dropout(0.3)] for _ in range(3)]
    model = keras.Sequential([keras.Input((units,)), *(layer for block in hidden for layer in block), layers.Dense(1)])
    model.compile("adam", "mse")
clock = Clock()
epochs = -(-steps // 32)
model.fit(x, y, batch_size=64, epochs=epochs, verbose=0, callbacks=[clock])
audited = np.median(clock.audited)
print(f"{trainer.task}: {trainer.strategy.audit.done} audits of {32 * epochs} steps, no false alarm")
print(f"an audited step {1000 * audited:.1f} ms")
if clock.seconds:
    step = np.median(clock.seconds)
    print(f"another step {1000 * step:.1f} ms: an audit costs {(audited - step) / step:.2f} steps")
