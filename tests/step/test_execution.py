"""An execution traces a step once and leaves no trace where it finds no data; a batch with a label out of range raises an error."""

from __future__ import annotations

import gc
import itertools
import pathlib
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers
from tfdist.compat import tf_internals
from tfdist.errors import ConfigError

README = pathlib.Path(__file__).parents[2] / "README.md"


def drop_the_last_slowly(x, y):
    def keep(number):
        if number < 0:
            time.sleep(0.1)
        return np.bool_(number >= 0)

    return tf.ensure_shape(tf.numpy_function(keep, [x[0]], tf.bool), [])


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("strategy", tiers.cases(["mirrored", "one_device"], quick=1))
def test_the_end_of_data_of_unknown_size_counts_for_nothing(strategy, mirrored):
    trainer = tfdist.Trainer(mirrored if strategy == "mirrored" else strategy)
    with trainer.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.ones((18, 2), np.float32)
    x[16:] = -1
    # It takes a while until it is known that there are no more: what needs no data could run meanwhile.
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).filter(drop_the_last_slowly).batch(4)
    trainer.fit(model, data, epochs=3, verbose=0)
    local = trainer.strategy.experimental_local_results
    assert [int(component) for component in local(model.optimizer.iterations.value)] == [12] * trainer.num_replicas
    counts = [int(component[1]) for component in local(model.layers[0].seed_generator.state.value)]
    assert counts == counts[:1] * trainer.num_replicas
    fresh = keras.random.SeedGenerator(0)
    for _ in range(12):
        fresh.next()
    assert counts[0] == int(fresh.state[1]), "no mask was drawn for a step that did not happen"


def of_loss_nine(steps=1):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.0), "mse", steps_per_execution=steps)
    return model


def of_unknown_length():
    rows = tf.data.Dataset.from_tensor_slices((np.ones((32, 1), np.float32), np.full((32, 1), 3.0, np.float32)))
    return rows.filter(lambda *_: True).batch(8, drop_remainder=True)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.skipif(keras.__version__ >= "3.16", reason="corrected in Keras 3.16")
def test_stock_keras_reports_what_the_readme_says():
    (said,) = re.findall(r"report a wrong loss, (\d\.\d) where every example has the loss 9", README.read_text())
    assert of_loss_nine().fit(of_unknown_length(), shuffle=False, verbose=0).history["loss"] == pytest.approx(
        [float(said)]
    )


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("strategy", "steps"),
    tiers.cases(
        itertools.product(["one_device", "central_storage"], [1, 3]), quick=[("one_device", 3), ("central_storage", 1)]
    ),
)
def test_the_end_of_the_data_is_no_step(strategy, steps):
    """keras#23084; `tests/cases/sources/unknown_length.py` tests the other strategies."""
    trainer = tfdist.Trainer(strategy)
    with trainer.scope():
        model = of_loss_nine(steps)
    data = of_unknown_length()
    assert trainer.fit(model, data, verbose=0).history == {"loss": [9.0]}
    assert trainer.evaluate(model, data, verbose=0) == 9.0


@pytest.mark.parametrize(
    ("method", "wrong"),
    tiers.cases(itertools.product(["fit", "evaluate"], [3, -1]), quick=[("fit", -1), ("evaluate", 3)]),
)
def test_a_label_out_of_range_is_said(mirrored, wrong, method):
    trainer = tfdist.Trainer(mirrored)
    with trainer.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = np.array([0, 1, 2, wrong] * 2)
    with pytest.raises(
        ConfigError, match=f"A batch has the label {wrong}, and the model 3 classes: labels go from 0 to 2"
    ):
        getattr(trainer, method)(model, np.ones((8, 2), np.float32), labels, batch_size=4, verbose=0)


class Traced(keras.Model):
    """Counts the traces of a step that extends Keras' own."""

    def train_step(self, data):
        self.traces = getattr(self, "traces", 0) + 1
        return super().train_step(data)


@pytest.mark.parametrize("steps", tiers.cases([5, 1], quick=1))
def test_a_step_that_extends_keras_own_is_traced_once_for_each_replica(mirrored, steps):
    with mirrored.scope():
        inputs = keras.Input((2,))
        model = Traced(inputs, keras.layers.Dense(1)(inputs))
        model.compile("adam", "mse", steps_per_execution=steps)
    x = np.ones((20, 2), np.float32)
    model.fit(x, x[:, :1], batch_size=2, epochs=2, verbose=0)
    assert model.traces == 2


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.ones((8, 1), np.float32), np.ones((8, 1), np.float32)


def alive():
    """Returns the numbers of this process's threads and of traced graphs."""
    gc.collect()
    graphs = [value for value in gc.get_objects() if type(value) is tf_internals.FuncGraph]
    return len(list(pathlib.Path("/proc/self/task").iterdir())), len(graphs)


def test_a_fit_of_a_fresh_model_leaves_no_thread_and_no_graph(mirrored):
    trainer = tfdist.Trainer(mirrored)
    counts = []
    for _ in range(5):
        with trainer.scope():
            model = of_loss_nine()
        model.fit(Batches(workers=2), verbose=0)
        del model
        counts.append(alive())
    # A thread of TensorFlow's pools may come or go; a leak would add one thread for each fit.
    assert counts[4][0] - counts[1][0] < 3
    assert counts[4][1] == counts[1][1]
