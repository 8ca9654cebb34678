"""Data in a form that Keras distributes over the replicas."""

import gc
import itertools
import weakref

import numpy as np

from tfdist.compat import keras_loops
from tfdist.data.generator_batches import GeneratorReading, batches_of


def test_a_generator_loses_nothing():
    batches = ((np.full((2, 1), number, np.float32),) for number in range(20))
    dataset = keras_loops.generator_adapter(GeneratorReading(batches).batches).get_tf_dataset()
    assert [int(x[0, 0]) for (x,) in dataset] == list(range(20))


def test_a_generator_is_freed_with_the_batches_read_ahead():
    batches = (np.zeros(3) for _ in range(9))
    reading = GeneratorReading(batches)
    assert len(list(itertools.islice(reading.batches(), 4))) == 4
    freed = weakref.ref(batches_of(batches))
    del batches, reading
    gc.collect()
    assert freed() is None
