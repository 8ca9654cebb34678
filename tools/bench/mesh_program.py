"""One task of `tools.bench.mesh`. Arguments: output folder, options as JSON."""

import json
import math
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tfdist.compat import keras_internals

FOLDER, OPTIONS = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
WORDS, HEADS, STEPS, WARM = 1024, 8, 20, 5
WIDTH, LENGTH, BATCH, GROUPS, MEMBERS = (OPTIONS[name] for name in ("width", "length", "batch", "groups", "members"))


def layout_map(mesh):
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["words.*embeddings"] = ("model", None)
    layouts["attention.*(query|key|value).*kernel"] = (None, "model", None)
    layouts["attention.*(query|key|value).*bias"] = ("model", None)
    layouts[".*attention_output.*kernel"] = ("model", None, None)
    layouts["(wide|logits).*kernel"] = (None, "model")
    layouts["(wide|logits).*bias"] = ("model",)
    layouts["narrow.*kernel"] = ("model", None)
    return layouts


def make_trainer():
    if MEMBERS == 1:
        return tfdist.Trainer("multi_worker_mirrored" if GROUPS else "one_device")
    names = [f"worker:{number}" for number in range(GROUPS * MEMBERS)]
    mesh = keras.distribution.DeviceMesh((GROUPS, MEMBERS), ("batch", "model"), names)
    distribution = keras.distribution.ModelParallel(layout_map=layout_map(mesh), batch_dim_name="batch")
    return tfdist.Trainer("multi_worker_mirrored", distribution=distribution)


def transformer():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="words")(inputs)
    for number in range(OPTIONS["blocks"]):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{number}")(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"wide_{number}")(y)
        x = x + layers.Dense(WIDTH, name=f"narrow_{number}")(y)
    return keras.Model(inputs, layers.Dense(WORDS, name="logits")(layers.LayerNormalization()(x)))


class Clock(keras.callbacks.Callback):
    """The seconds of each step."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self.begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.begin)


def record_sums(group, sums):
    """Makes each sum of activations in a trace append its bytes."""
    add = group.add

    def recorded(value, *args):
        for each in tf.nest.flatten(value):
            sizes = [size or BATCH // GROUPS for size in each.shape]  # the batch may have an unknown size
            sums.append(math.prod(sizes) * each.dtype.size)
        return add(value, *args)

    group.add = recorded


trainer = make_trainer()
with trainer.scope():
    model = transformer()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, jit_compile=False)
sums = []
if MEMBERS > 1:
    record_sums(trainer.strategy.mesh.group, sums)
x = np.random.default_rng(0).integers(0, WORDS, (BATCH * (WARM + STEPS), LENGTH), np.int32)
clock = Clock()
model.fit(x, x, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[clock])
values = [keras_internals.raw_value(each) for each in [*model.variables, *model.optimizer.variables]]
held = sum(value.shape.num_elements() * value.dtype.size for value in values)
result = {"seconds": clock.seconds[WARM:], "summed": sum(sums), "held": held}
rank = trainer.task.index if trainer.task else 0
(FOLDER / f"results-{rank}.json").write_text(json.dumps(result))
