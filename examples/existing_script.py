"""A plain Keras script, and the two lines (marked) that make it train on several devices or machines.

    python examples/existing_script.py                                # one process
    tfdist launch --workers=2 -- python examples/existing_script.py   # two processes

The model learns whether a point lies inside a circle. Takes about 10 s; expect an accuracy above 0.9.
"""

import pathlib

import tfdist

trainer = tfdist.Trainer("multi_worker_mirrored")  # (1) before any tensor

import keras  # noqa: E402
import numpy as np  # noqa: E402

keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
x = rng.uniform(-1, 1, (2048, 2)).astype(np.float32)
y = (np.square(x).sum(axis=1) < 0.64).astype(np.float32)

with trainer.scope():  # (2) around the code that builds, loads or compiles the model
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(32),
            keras.layers.BatchNormalization(momentum=0.9, synchronized=True),
            keras.layers.ReLU(),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="binary_crossentropy", metrics=["accuracy"])

model.fit(x[:1536], y[:1536], batch_size=64, epochs=10, validation_data=(x[1536:], y[1536:]), verbose=2)
loss, accuracy = model.evaluate(x[1536:], y[1536:], verbose=0)
print(f"accuracy {accuracy:.4f} on {trainer.num_replicas} replicas")
pathlib.Path("runs").mkdir(exist_ok=True)
model.save("runs/circle.keras")
