"""A task that trains for some seconds, while its link is down for some. Arguments: strategy, transport (or nothing), folder.

The number of workers' steps is given: what they train must be the same with and without an outage. Under parameter servers the training
lasts until the folder says that the outage is over.
"""

import hashlib
import pathlib
import sys
import time

import tfdist

STRATEGY, TRANSPORT, FOLDER = sys.argv[1:]
folder = pathlib.Path(FOLDER)
trainer = tfdist.Trainer(
    tfdist.StrategyConfig(name=STRATEGY, **({"transport": TRANSPORT} if TRANSPORT else {})), start_timeout=120
)

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

STEPS = 60


class Slowly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)
        if batch == 20:
            (folder / f"{trainer.task} trains").touch()

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = (folder / "over").exists()


x = np.random.default_rng(0).uniform(-1, 1, (16 * STEPS, 32)).astype("float32")
keras.utils.set_random_seed(1)
with trainer.scope():
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
callbacks = [Slowly(), tfdist.BackupAndRestore(folder / "backup", save_freq=10)]
epochs = 1 if STRATEGY == "multi_worker_mirrored" else 1000
trainer.fit(model, x, x.sum(axis=1), batch_size=16, epochs=epochs, verbose=0, shuffle=False, callbacks=callbacks)
weights = hashlib.sha256(b"".join(np.asarray(each).tobytes() for each in model.get_weights())).hexdigest()
print(f"{trainer.task} ends with {weights}\n", end="", flush=True)
