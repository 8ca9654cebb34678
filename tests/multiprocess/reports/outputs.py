"""Outputs of `predict` that are no numbers."""

import keras
import numpy as np
import tensorflow as tf

from tests.multiprocess.reports.cases import MIRRORED, TWO_EACH, WORKERS, case


class Texts(keras.Model):
    """Returns texts of different lengths with bytes that are no letters, and numbers."""

    def call(self, inputs):
        numbers = tf.strings.as_string(tf.cast(inputs, tf.int32))
        return {"text": tf.strings.join([numbers, b"\x00\xff"]), "number": inputs}


@case(MIRRORED, WORKERS, TWO_EACH)
def texts(world):
    numbers = np.arange(7, dtype="float32")[:, np.newaxis] ** 4
    with world.scope():
        model = Texts()
    outputs = model.predict(numbers, batch_size=3, verbose=0)
    right = [[b"%d\x00\xff" % number] for number in numbers[:, 0].astype(int)]
    return {"text": (outputs["text"].tolist() == right, True), "number": (outputs["number"], numbers)}
