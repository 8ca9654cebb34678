"""One task of `tools.bench.accuracy`. Arguments: output folder, options as JSON.

One model for each compressor, of which each run begins with weights of its seed, and an optimizer and a compressor that have done
nothing yet. Alone in its cluster, a process has the replicas on virtual CPUs.
"""

import json
import pathlib
import statistics
import sys
import time

import tfdist

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
found = tfdist.find_cluster()
alone = len(list(found[0].tasks())) == 1
trainer = (
    tfdist.Trainer("mirrored", False, devices=OPTIONS["replicas"]) if alone else tfdist.Trainer("multi_worker_mirrored")
)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.gradients.optimizer import get_reduction  # noqa: E402
from tfdist.tasks import digits  # noqa: E402
from tools.bench import compressors  # noqa: E402

_, (images, labels) = digits.load()
task = digits.Digits(digits.Options())
local = trainer.strategy.experimental_local_results


class Watch(keras.callbacks.Callback):
    """Looks every few steps whether the target is reached."""

    def __init__(self):
        super().__init__()
        self.reached = None
        self.seconds = []  # of each few steps, without what stands between

    def on_train_batch_begin(self, batch, logs=None):
        if batch % EVERY == 0:
            self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if (batch + 1) % EVERY:
            return
        self.seconds.append(time.perf_counter() - self.began)
        if self.reached is None and accuracy() >= OPTIONS["target"]:
            self.reached = batch + 1
            self.model.stop_training = bool(OPTIONS.get("stop"))


def accuracy():
    return float((guess().numpy() == labels).mean())


def build(name):
    mine = tfdist.Trainer(trainer.strategy, compression=compressors.make(name))
    with mine.scope():
        made = task.build_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.SGD(momentum=0.9), loss, metrics=["accuracy"])
    mine.fit(made, batches(0), steps_per_epoch=1, verbose=0)  # which makes all variables
    guesses = tf.function(lambda: tf.argmax(made(images, training=False), -1))
    return mine, made, guesses, [(part, part.numpy()) for v in seeds(made) for part in local(v.value)]


def seeds(made):
    return [variable for variable in made.variables if "seed_generator" in variable.path]


def batches(seed):
    return lambda context: task.train_data(context, BATCH, seed)


def begin(made, masks, rate, seed):
    """Makes a model, its dropout, its optimizer and its compressor what they are before the first step."""
    keras.utils.set_random_seed(seed)
    with trainer.scope():
        made.set_weights(task.build_model().get_weights())
    for part, value in masks:
        part.assign(value + np.array([seed, 0], value.dtype))
    for variable in made.optimizer.variables:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    made.optimizer.learning_rate = rate
    if reduction := get_reduction(made.optimizer):
        for number, (slots, states) in enumerate(zip(reduction.slots, reduction.states, strict=True)):
            for slot, state in zip(slots, states, strict=True):
                for part in local(state):
                    part.assign(slot.initial(slot.shape, number))


BATCH, EVERY = 64, 4
results, made = [], {}
for name, rate, seed in OPTIONS["runs"]:
    if name not in made:
        made[name] = build(name)
    mine, model, guess, masks = made[name]
    begin(model, masks, rate, seed)
    watch = Watch()
    mine.fit(model, batches(seed), steps_per_epoch=OPTIONS["steps"], verbose=0, callbacks=[watch])
    results.append(
        {
            "name": name,
            "rate": rate,
            "reached": watch.reached is not None,
            "steps": watch.reached or OPTIONS["steps"],
            "seconds": watch.seconds,
            "step_seconds": statistics.median(watch.seconds[1:] or watch.seconds) / EVERY,
            "accuracy": accuracy(),
        }
    )
if trainer.is_chief:
    (FOLDER / "results.json").write_text(json.dumps({"runs": results}))
