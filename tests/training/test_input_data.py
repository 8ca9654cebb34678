"""Data in a form that Keras distributes over the replicas."""

import numpy as np

from tfdist.compat import keras_loops


def test_a_generator_loses_nothing():
    batches = ((np.full((2, 1), number, np.float32),) for number in range(20))
    dataset = keras_loops.generator_adapter(batches).get_tf_dataset()
    assert [int(x[0, 0]) for (x,) in dataset] == list(range(20))
