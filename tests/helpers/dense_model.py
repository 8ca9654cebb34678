"""A model of one layer, for tests of what surrounds it."""

import keras


def build(trainer, **kwargs):
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        kwargs = {name: value() if callable(value) else value for name, value in kwargs.items()}
        model.compile(**{"optimizer": "sgd", "loss": "mse", **kwargs})
    return model
