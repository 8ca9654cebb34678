"""Data that Python code makes: training leaves its arrays alone, and workers of a PyDataset keep its order."""

import threading
import time

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


class InTurn(keras.utils.PyDataset):
    """Batches of the numbers of their positions, the first ones of which take the longest.

    Args:
        number: The number of batches, None for endless.
        shifts: Whether each epoch adds 100.
        fails: The position of a batch that is an error.
    """

    def __init__(self, number, shifts=False, fails=None):
        super().__init__(workers=2, max_queue_size=3)
        self._number, self._shifts, self._fails, self._epochs = number, shifts, fails, 0

    @property
    def num_batches(self):
        return self._number

    def __getitem__(self, index):
        if index == self._fails:
            raise KeyError("of a worker")
        time.sleep(0.01 * (3 - index % 4))
        return np.zeros((2, 1), np.float32), np.full((2, 1), index + 100 * self._epochs, np.float32)

    def on_epoch_begin(self):
        self._epochs += self._shifts


class Targets(keras.callbacks.Callback):
    """Notes the targets that a bias was trained on by SGD with the rate 0.5: it is the mean of the last ones."""

    def __init__(self, stops_at=None):
        super().__init__()
        self.seen, self._stops_at = [], stops_at

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(round(float(self.model.get_weights()[1][0]), 3))
        self.model.stop_training = len(self.seen) == self._stops_at


@pytest.mark.parametrize(
    ("number", "epochs", "steps", "stops_at", "targets"),
    [
        pytest.param(
            *(5, 3, None, None, [100 * epoch + each for epoch in (1, 2, 3) for each in range(5)]), id="finite"
        ),
        pytest.param(*(None, 3, 4, None, [*range(12)]), id="endless", marks=pytest.mark.full),
        pytest.param(*(20, 3, 4, None, [*range(12)]), id="over several epochs", marks=pytest.mark.full),
        pytest.param(*(20, 1, None, 3, [100, 101, 102]), id="stopped"),
    ],
)
def test_workers_of_a_py_dataset_keep_its_order_and_end(mirrored, number, epochs, steps, stops_at, targets):
    model, seen = bias(mirrored), Targets(stops_at)
    model.fit(
        InTurn(number, shifts=steps is None),
        epochs=epochs,
        steps_per_epoch=steps,
        shuffle=False,
        verbose=0,
        callbacks=[seen],
    )
    assert seen.seen == targets
    wait_for_end_of_workers()


def test_an_error_of_a_py_datasets_worker_ends_the_training(mirrored):
    model, seen = bias(mirrored), Targets()
    with pytest.raises(tf.errors.OpError, match="of a worker"):
        model.fit(InTurn(9, fails=6), shuffle=False, verbose=0, callbacks=[seen])
    wait_for_end_of_workers()
    model.fit(InTurn(3), shuffle=False, verbose=0, callbacks=[seen])
    assert seen.seen[-3:] == [0, 1, 2]


def bias(trainer):
    with trainer.scope():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def wait_for_end_of_workers():
    """Waits until no thread of Keras' reads a PyDataset."""
    limit = time.monotonic() + 20
    while any(each.name.startswith("Worker_") for each in threading.enumerate()):
        assert time.monotonic() < limit, "a thread reads on"
        time.sleep(0.05)
