"""Variables of the model and the optimizer, read by users' code."""

import keras
import numpy as np

from tests.multiprocess.reports.cases import MIRRORED, SERVERS, WORKERS, case


@case(MIRRORED, WORKERS, SERVERS)
def numbers_of_variables_after_fit(world):
    with world.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.25), "mse")
    model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=4, verbose=0)
    return {
        "rate": (model.optimizer.learning_rate.numpy(), 0.25),
        "steps": (model.optimizer.iterations.numpy(), 2),
    }
