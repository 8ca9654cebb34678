"""Trains with audits, without them, and with a layer that flips a bit on worker 1. Arguments: strategy, output folder, `once` or `always`."""

import sys

import tfdist
from tests.multiprocess import harness

name, out, fault = sys.argv[1:]
trainer = tfdist.Trainer(name, audit_every=1)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.errors import AuditError  # noqa: E402

FROM = (
    4  # the backward pass from which worker 1 flips the bit, in step 3: step 1 is repeated, and step 2 is not audited
)
passes = 0


def bit():
    global passes
    passes += 1
    flips = passes == FROM if fault == "once" else passes >= FROM
    return np.int32(flips and trainer.task.index == 1)


class Faulty(keras.layers.Layer):
    """The identity, of whose gradient a bit may be flipped."""

    def call(self, inputs):
        @tf.custom_gradient
        def same(inputs):
            def gradient(upstream):
                bits = tf.bitcast(upstream, tf.int32)
                return tf.bitcast(tf.bitwise.bitwise_xor(bits, tf.numpy_function(bit, [], tf.int32)), tf.float32)

            return tf.identity(inputs), gradient

        return same(inputs)


rng = np.random.default_rng(0)
X = rng.normal(size=(27, 8)).astype(np.float32)  # the last batch of 8 has 3 examples
Y = rng.normal(size=(27, 1)).astype(np.float32)


def make(*extra):
    keras.utils.set_random_seed(1)
    with trainer.scope():
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), *extra]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=2)
    return model


def train(model):
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
    return [history["loss"], history["mae"], *model.get_weights()]


results = {}
if fault == "once":
    audit, trainer.strategy.audit = trainer.strategy.audit, None
    results["without"] = train(make())
    trainer.strategy.audit = audit
    results["with"] = train(make())
    results["audits"] = audit.done
try:
    train(make(Faulty()))
except AuditError as e:
    results["error"] = str(e)
harness.store(out, trainer.task.index, results)
