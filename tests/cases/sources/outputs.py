"""Outputs of `predict` that are no numbers."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases.arms import ALL
from tests.cases.case import case


class Texts(keras.Model):
    """Returns texts of different lengths with bytes that are no letters, and numbers."""

    def call(self, inputs):
        numbers = tf.strings.as_string(tf.cast(inputs, tf.int32))
        return {"text": tf.strings.join([numbers, b"\x00\xff"]), "number": inputs}


@case(*ALL)
def texts(world):
    numbers = np.arange(7, dtype="float32")[:, np.newaxis] ** 4
    with world.scope():
        model = Texts()
        model.build((None, 1))
    outputs = model.predict(numbers, batch_size=3, verbose=0)
    right = [[b"%d\x00\xff" % number] for number in numbers[:, 0].astype(int)]
    return {"text": (outputs["text"].tolist() == right, True), "number": (outputs["number"], numbers)}
