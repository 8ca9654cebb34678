"""Training leaves the arrays alone that the Python code of the data holds."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers


def aligned(array):
    """Returns a copy at an address at which TensorFlow uses memory in place."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def py_dataset(images, ones):
    class Pairs(keras.utils.PyDataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return tuple(each[index % 4 * 5 :][:5] for each in (images, ones))

    return Pairs(workers=1)


def from_generator(images, ones):
    pairs = py_dataset(images, ones)
    specs = tuple(tf.TensorSpec((5, *each.shape[1:]), each.dtype) for each in (images, ones))
    return tf.data.Dataset.from_generator(lambda: (pairs[n] for n in range(12)), output_signature=specs)


@pytest.mark.parametrize("make", [py_dataset, pytest.param(from_generator, marks=pytest.mark.full)])
def test_training_does_not_write_into_the_arrays_of_a_python_dataset(mirrored, make):
    rng = np.random.default_rng(0)
    given = rng.standard_normal((20, 8, 8, 3)).astype(np.float32), rng.integers(0, 2, (20, 8, 8, 1)).astype(np.float32)
    images, ones = map(aligned, given)
    with mirrored.scope():
        inputs = keras.Input((8, 8, 3))
        model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(inputs))
        model.compile("sgd", "binary_crossentropy")
    model.fit(make(images, ones), steps_per_epoch=12, shuffle=False, verbose=0)
    np.testing.assert_array_equal(images, given[0])
    np.testing.assert_array_equal(ones, given[1])
