"""Python data begin at any step of a pass: items that draw nothing are not made again. A dead worker process is an error."""

import os
import signal
import threading

import keras
import numpy as np
import pytest

import tfdist
from tfdist.training.python_source import open_python_source


class Items(keras.utils.PyDataset):
    def __init__(self, length=9, **how):
        super().__init__(**how)
        self.length, self.made = length, []

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        self.made.append(index)
        return np.full((2, 1), index, np.float32), np.zeros(2)


@pytest.fixture(scope="module")
def engine():
    return tfdist.Trainer("one_device").strategy.engine


def numbers(source, iterator, count):
    found = []
    for _ in range(count):
        source.prepare(1)
        found.append(int(next(iterator)[0][0, 0]))
    source.close()
    return found


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("length", [9, None])
@pytest.mark.parametrize("makes_skipped", [False, True])
def test_a_pass_begins_at_a_step(engine, workers, length, makes_skipped):
    data = Items(length, workers=workers)
    source = open_python_source(engine, data, shuffle=False, per_execution=1)
    data.made.clear()
    source.makes_skipped, moments = makes_skipped, []
    source.before_reading = lambda: moments.append("reading")
    iterator = source.open_at(2, 5, lambda: moments.append("ready"))
    assert numbers(source, iterator, 4) == [5, 6, 7, 8]
    assert moments == ["ready", "reading"]
    assert {0, 1, 2, 3, 4} <= {*data.made} if makes_skipped else min(data.made) == 5


def test_a_generator_is_read_from_its_beginning(engine):
    batches = ((np.full((2, 1), index, np.float32), np.zeros(2)) for index in range(9))
    source = open_python_source(engine, batches, shuffle=False, per_execution=1)
    source.makes_skipped = False
    assert numbers(source, source.open_at(1, 3, lambda: None), 3) == [3, 4, 5]


def test_a_pass_that_is_dropped_makes_no_more_items(engine):
    data = Items(None)
    source = open_python_source(engine, data, shuffle=False, per_execution=1)
    assert numbers(source, source.open(), 1) == [0]
    (thread,) = [each for each in threading.enumerate() if each.name == "tfdist-data"] or [None]
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()


class Killed(Items):
    test = os.getpid()

    def __getitem__(self, index):
        if index == 7 and os.getpid() != self.test:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full((2, 1), index, np.float32), np.zeros((2, 1))


def test_a_worker_process_that_dies_is_an_error():
    trainer = tfdist.Trainer("one_device")
    with trainer.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = Killed(20, workers=2, use_multiprocessing=True)
    with pytest.raises(tfdist.DataError, match="a worker process of the PyDataset Killed has ended with exit code -9"):
        trainer.fit(model, data, verbose=0)
