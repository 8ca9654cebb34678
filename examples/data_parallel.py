"""A data-parallel script in the manner of Keras' guide to keras.distribution, on TensorFlow, with two lines added (marked).

    python examples/data_parallel.py                                # one process, on all its devices
    tfdist launch --workers=2 -- python examples/data_parallel.py   # two processes

The data are random. Takes about 10 s; expect a final loss below 1. The last four lines print the loss and save the model.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"  # in place of "jax"

import keras
import numpy as np
from keras import layers
from tensorflow import data as tf_data

import tfdist

keras.utils.set_random_seed(1)
devices = keras.distribution.list_devices()
mesh = keras.distribution.DeviceMesh(shape=(len(devices),), axis_names=["data"], devices=devices)
keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
trainer = tfdist.Trainer()  # (1) before any tensor

inputs = np.random.normal(size=(128, 28, 28, 1))
labels = np.random.normal(size=(128, 10))
dataset = tf_data.Dataset.from_tensor_slices((inputs, labels)).batch(16)

with trainer.scope():  # (2) around the code that builds and compiles the model
    inputs = layers.Input(shape=(28, 28, 1))
    y = layers.Flatten()(inputs)
    y = layers.Dense(units=200, use_bias=False, activation="relu")(y)
    y = layers.Dropout(0.4)(y)
    y = layers.Dense(units=10, activation="softmax")(y)
    model = keras.Model(inputs=inputs, outputs=y)
    model.compile(loss="mse")

model.fit(dataset, epochs=3)
loss = model.evaluate(dataset)

if trainer.is_chief:
    print(f"final loss {loss:.4f} on {trainer.num_replicas} replicas")
os.makedirs("runs", exist_ok=True)
model.save("runs/data_parallel.keras")
