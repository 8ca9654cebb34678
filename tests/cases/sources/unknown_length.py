"""Datasets whose number of batches is not known before they end."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import MIRRORED, SERVERS, WORKERS
from tests.cases.case import case


@case(MIRRORED, WORKERS, SERVERS)
def the_end_of_the_data_is_no_step(world):
    """keras#23084: the loss of 32 examples, 9 for each, is 7.2 if the end of the data counts as a fifth step."""
    pairs = {}
    for steps in (1, 3):
        with world.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mse"], steps_per_execution=steps)

        def examples():
            rows = tf.data.Dataset.from_tensor_slices((np.ones((32, 1), "float32"), np.full((32, 1), 3.0, "float32")))
            return rows.filter(lambda *_: True).batch(8, drop_remainder=True)

        history = model.fit(examples(), verbose=0).history
        pairs[f"fit, {steps} steps"] = [*history["loss"], *history["mse"]], [9.0, 9.0]
        pairs[f"evaluate, {steps} steps"] = model.evaluate(examples(), verbose=0), [9.0, 9.0]
        pairs[f"updates, {steps} steps"] = int(model.optimizer.iterations.numpy()), 4
    return pairs
