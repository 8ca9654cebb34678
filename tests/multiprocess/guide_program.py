"""Makes the calls of Keras' guide to distributed training. Arguments: strategy, output folder, the mesh as `1x2`. `stock` is Keras on one device.

https://keras.io/guides/distribution/ has one process with all devices; a cluster has a device for each worker. Stores the losses, the
weights, and the elements of this worker's variables.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.multiprocess import harness

strategy, out, shape = sys.argv[1:]
scope = keras.name_scope("alone")
rank = 0
if strategy != "stock":
    sizes = tuple(map(int, shape.split("x")))
    devices = [f"cpu:{number}" for number in range(sizes[0] * sizes[1])]
    mesh = keras.distribution.DeviceMesh(shape=sizes, axis_names=["data", "model"], devices=devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["d1/kernel"] = (None, "model")
    layout_map["d1/bias"] = ("model",)
    layout_map["d2/output"] = ("data", None)
    distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    keras.distribution.set_distribution(distribution)
    trainer = tfdist.Trainer()
    scope = trainer.scope()
    rank = trainer.task.index

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.standard_normal((128, 28, 28, 1)).astype("float32")
y = rng.integers(0, 10, 128)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)

with scope:
    inputs = keras.layers.Input(shape=(28, 28, 1))
    hidden = keras.layers.Flatten()(inputs)
    hidden = keras.layers.Dense(units=200, use_bias=True, activation="relu", name="d1")(hidden)
    hidden = keras.layers.Dropout(0.4)(hidden)
    outputs = keras.layers.Dense(units=10, activation="softmax", name="d2")(hidden)
    model = keras.Model(inputs=inputs, outputs=outputs)
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
history = model.fit(dataset, epochs=2, verbose=0).history
evaluated = model.evaluate(dataset, verbose=0)
elements = sum(int(np.prod(variable._value.shape)) for variable in model.trainable_variables)
results = {"losses": history, "evaluated": evaluated, "weights": model.get_weights(), "elements": elements}
harness.store(out, rank, results)
