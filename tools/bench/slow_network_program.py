"""One task of `tools.bench.slow_network`. Arguments: output folder, options as JSON."""

from __future__ import annotations

import json
import pathlib
import sys
import time

import tfdist

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
trainer = tfdist.Trainer("multi_worker_mirrored", transport="tcp", sync_every=OPTIONS["sync_every"])

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

from tfdist.tasks import digits  # noqa: E402
from tools.bench import compressors, models, slow_network, turns  # noqa: E402

_, (images, labels) = digits.load()
images = images.reshape(len(images), -1)


class Watch(keras.callbacks.Callback):
    """Adds up the seconds of the steps, and looks from time to time whether the target is reached."""

    only_observes = True

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.steps, self.reached = 0.0, 0, False
        self._every = max(slow_network.EVERY, OPTIONS["sync_every"])

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self.steps:
            self.seconds += time.perf_counter() - self._began
        self.steps += 1
        if self.steps % self._every == 0 and accuracy(self.model) >= slow_network.TARGET:
            self.reached = self.model.stop_training = True


def accuracy(model: keras.Model) -> float:
    """Returns the share of the test images that a model classifies rightly, computed on this worker."""
    hidden = images
    weights = model.get_weights()
    for kernel, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        hidden = np.maximum(hidden @ kernel + bias, 0)
    return float(((hidden @ weights[-2] + weights[-1]).argmax(-1) == labels).mean())


def train(name: str, seed: int) -> dict[str, object]:
    """Trains a model until the target."""
    keras.utils.set_random_seed(seed)
    trainer.compression = compressors.make(name if name in compressors.COMPRESSORS else "none")
    with trainer.scope():
        model = models.mlp(keras, slow_network.WIDTHS)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(slow_network.LEARNING_RATE, slow_network.MOMENTUM), loss)
    (x, y), _ = digits.load()
    rng, size = np.random.default_rng(seed), slow_network.MOST_STEPS * slow_network.BATCH
    drawn = np.concatenate([rng.permutation(len(x)) for _ in range(size // len(x) + 1)])[:size]
    watch, before = Watch(), turns.sent()
    model.fit(
        x.reshape(len(x), -1)[drawn],
        y[drawn],
        batch_size=slow_network.BATCH,
        shuffle=False,
        verbose=0,
        callbacks=[watch],
    )
    return {
        "seconds": watch.seconds,
        "steps": watch.steps,
        "reached": watch.reached,
        "sent": (turns.sent() - before) / 1e6,
    }


names = OPTIONS["names"]
runs = {name: [] for name in names}
for seed in range(OPTIONS["seeds"]):
    for name in names:
        runs[name].append(train(name, seed))
if trainer.is_chief:
    (FOLDER / "results.json").write_text(json.dumps({"runs": runs}))
