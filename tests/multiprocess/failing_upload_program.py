"""Two workers train with backups at a URL whose server fails. Arguments: strategy, folder for the results, URL.

Stores the error of `fit`, the number of its steps, and the final weights.
"""

import sys

import tfdist
from tests.multiprocess import harness

trainer = tfdist.Trainer(sys.argv[1])

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

x, y = np.arange(128, dtype=np.float32).reshape(32, 4) / 128, np.ones((32, 1), np.float32)
keras.utils.set_random_seed(1)
with trainer.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
error = ""
try:
    callbacks = [tfdist.BackupAndRestore(sys.argv[3], 4, delete_checkpoint=False)]
    trainer.fit(model, x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks, shuffle=False)
except (tfdist.BackupError, tfdist.ConfigError) as e:
    error = f"{type(e).__name__}: {e}"
results = {"error": error, "steps": int(model.optimizer.iterations.numpy()), "weights": model.get_weights()}
harness.store(sys.argv[2], trainer.task.index, results)
