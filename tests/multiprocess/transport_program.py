"""Trains models whose gradients travel by a transport, and again by TensorFlow's collectives, in the same processes.

Arguments: strategy, output folder, and which cases (all). The transport is `harness.transport()`.
"""

import sys

import tfdist
from tests.helpers.options import set_options
from tests.multiprocess import harness

name, out, *only = sys.argv[1:]
trainer = tfdist.Trainer(name, **harness.transport())

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tests.compression import test_compressors  # noqa: E402
from tfdist.collectives.communicator import cross_process_communicator  # noqa: E402

tf.config.experimental.enable_op_determinism()
set_options(trainer.strategy, bucket_bytes=4000)  # several of each model
SIZE = 77  # the last of the batches of 16 has 13
rng = np.random.default_rng(0)
X = rng.standard_normal((SIZE, 12)).astype(np.float32)
Y = rng.integers(0, 3, SIZE).astype(np.int32)
WORDS = np.abs(X * 3).astype(np.int32) % 9


def dense():
    return [keras.layers.Dense(400), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Dense(3)]


def bag():
    return [keras.layers.Embedding(10, 5), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]


ALL = test_compressors.ALL
CASES = {
    "executions": (dense, X, None, {"steps_per_execution": 4}),
    "rows": (bag, WORDS, None, {}),
    "all_gather": (dense, X, ALL["topk"], {}),
    "all_to_all": (dense, X, ALL["int8"], {}),
    "condition": (dense, X, ALL["warmup"], {"steps_per_execution": 4}),
}


def train(layers, x, compression, compiled):
    """Returns the weights before and after."""
    trainer.compression = compression
    keras.utils.set_random_seed(3)
    with trainer.scope():
        model = keras.Sequential([keras.Input(x.shape[1:]), *layers()])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, **compiled)
    before = model.get_weights()
    trainer.fit(model, x, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return before, model.get_weights()


def train_all():
    return {case: train(*how) for case, how in CASES.items() if case in (only or CASES)}


travelled = []
transport = trainer.strategy.communicator.transport


def counted(method):
    def call(*arguments, **named):
        travelled.append(method)
        return original(*arguments, **named)

    original = getattr(transport, method)
    return call


for each in ("all_reduce", "all_gather", "all_to_all"):
    setattr(transport, each, counted(each))
results = {"transport": trainer.strategy.transport, "mine": train_all(), "travelled": sorted(set(travelled))}
count = len(travelled)
trainer.strategy.communicator = cross_process_communicator(trainer.strategy)
results["tensorflow"] = train_all()
results["travelled since"] = len(travelled) - count
harness.store(out, trainer.task.index, results)
