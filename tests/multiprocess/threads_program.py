"""Workers with other numbers of threads. Arguments: strategy, folder for the results."""

import json
import os
import sys

RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
os.environ["TF_NUM_INTRAOP_THREADS"] = "14"[RANK]

import tfdist  # noqa: E402 (TensorFlow reads the number when it starts)
from tests.multiprocess import harness  # noqa: E402

trainer = tfdist.Trainer(sys.argv[1])

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.collectives import hardware  # noqa: E402
from tfdist.training import callback_sync  # noqa: E402


class Own(keras.optimizers.Optimizer):
    """Divides the whole gradient by its length, as nothing of Keras' does."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient / keras.ops.sqrt(keras.ops.sum(gradient * gradient)))


OPTIMIZERS = {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.01),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.01),
    "accumulated": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01, gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.SGD(0.1, clipnorm=0.01, use_ema=True, ema_overwrite_frequency=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb(0.01)),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "own": lambda: Own(0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
}
COMPRESSION = tfdist.CompressionConfig("powersgd", start_powerSGD_iter=0, matrix_approximation_rank=4)

rng = np.random.default_rng(0)
x = rng.standard_normal((64, 3000)).astype(np.float32)
y = rng.standard_normal((64, 64)).astype(np.float32)


def trained(trainer, optimizer):
    keras.utils.set_random_seed(1)
    with trainer.scope():
        model = keras.Sequential([keras.Input((3000,)), keras.layers.Dense(64)])
        model.compile(optimizer(), "mse")
    error = ""
    try:
        trainer.fit(model, x, y, batch_size=16, epochs=1, verbose=0)
    except tfdist.ClusterError as e:
        error = str(e)
    variables = [*model.weights, *model.optimizer.variables]
    return {"print": callback_sync.fingerprint(variables), "error": error, "kernel": model.layers[0].kernel.numpy()}


results = {name: trained(trainer, optimizer) for name, optimizer in OPTIMIZERS.items()}
compressed = tfdist.Trainer(trainer.strategy, compression=COMPRESSION)
results["powersgd"] = trained(compressed, lambda: keras.optimizers.SGD(0.1))
long = tf.constant(rng.standard_normal((3000, 64)), tf.float32)
results["sum"] = float(tf.reduce_sum(long))
results["difference"] = hardware.describe_difference(trainer.strategy)
harness.store(sys.argv[2], RANK, results)
