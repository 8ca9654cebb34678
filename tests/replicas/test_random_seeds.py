"""Each replica draws random numbers of its own, and two runs with one seed draw the same ones."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import tiers

KINDS = ("tf.random", "tf.function", "tf.cond", "tf.nn.dropout", "keras.random")


class Noisy(keras.Model):
    """A model whose `train_step` draws in each way, and keeps the numbers."""

    def __init__(self, steps=4):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.drawn = tf.Variable(tf.zeros([steps, len(KINDS), 16], tf.int32), trainable=False)  # each replica's own
        self.at = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="at")
        self.inner = tf.function(lambda: tf.random.uniform([16]))

    def call(self, x, training=False):
        return self.dense(x)

    def train_step(self, data):
        number = tf.convert_to_tensor(self.at)
        draws = [
            tf.random.uniform([16]),
            self.inner(),
            tf.cond(number >= 0, lambda: tf.random.uniform([16]), lambda: tf.zeros([16])),
            tf.nn.dropout(tf.ones([16]), 0.5) / 2,
            keras.random.uniform([16]),
        ]
        numbers = tf.cast(tf.stack(draws) * 1e6, tf.int32)
        self.drawn.assign(tf.tensor_scatter_nd_update(tf.convert_to_tensor(self.drawn), [[number]], numbers[None]))
        self.at.assign(number + 1)
        return super().train_step(data)


def draw(trainer, seed, way, dataset=False, **compiled):
    """Returns what was drawn: [replicas, steps, kinds, 16]."""
    keras.utils.set_random_seed(seed)
    with trainer.scope():
        model = Noisy()
        model.compile("sgd", "mse", **compiled)
    x = np.ones((16, 3), np.float32)
    data = (tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4),) if dataset else (x, x[:, :1])
    sized = {} if dataset else {"batch_size": 4}
    fit = model.fit if way == "bare" else lambda *args, **kwargs: trainer.fit(model, *args, **kwargs)
    fit(*data, verbose=0, **sized)
    return np.array([v.numpy() for v in trainer.strategy.experimental_local_results(model.drawn)])


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


@pytest.mark.parametrize(
    ("way", "arguments"),
    tiers.cases(
        [
            ("trainer", {"steps_per_execution": 4}),
            ("bare", {}),
            ("trainer", {}),
            ("trainer", {"dataset": True}),
            ("trainer", {"run_eagerly": True}),
        ],
        quick=2,
    ),
)
def test_replicas_and_steps_draw_numbers_of_their_own(trainer, way, arguments):
    drawn, again, other = (draw(trainer, seed, way, **arguments) for seed in (3, 3, 4))
    assert (drawn == again).all(), "two runs with one seed"
    assert drawn.shape == (2, 4, len(KINDS), 16)
    for place, kind in enumerate(KINDS):
        # The first step of an execution and the others call a tf.function in two places, and TensorFlow seeds both alike.
        if kind == "tf.function" and "steps_per_execution" in arguments:
            continue
        views = drawn[:, :, place].reshape(8, 16)
        for one, another in itertools.combinations(views, 2):
            assert (one != another).any(), kind
        assert (drawn[:, :, place] != other[:, :, place]).any(), f"{kind}: two seeds"


def test_numbers_without_a_seed_come_on_one_device_too():
    assert (draw(tfdist.Trainer("one_device"), 3, "trainer")[:, :, -1] > 0).any()


def test_the_traced_seed_and_generator_are_put_back(trainer):
    tf.random.set_seed(3)

    @tf.function
    def function():
        before = tf.compat.v1.get_default_graph().seed
        trainer.strategy.run(lambda: tf.random.uniform([]))
        return tf.constant([before, tf.compat.v1.get_default_graph().seed])

    assert function().numpy().tolist() == [3, 3]


def states(trainer, model):
    components = trainer.strategy.experimental_local_results(model.layers[0].seed_generator.state.value)
    return [component.numpy().tolist() for component in components]


def test_a_state_tree_gives_each_replica_its_seed_back(trainer):
    with trainer.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5, seed=7), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((16, 3), np.float32)
    trainer.fit(model, x, x[:, :1], batch_size=4, verbose=0)
    before, tree = states(trainer, model), model.get_state_tree("numpy_array")
    assert before[0] == [7, 4] and before[1][0] != 7
    trainer.fit(model, x, x[:, :1], batch_size=4, verbose=0)
    model.set_state_tree(tree)
    assert states(trainer, model) == before
    seed = model.layers[0].seed_generator.state
    seed.assign([8, 2])  # of another model
    assert states(trainer, model) == [[8, 2], [before[1][0] + 1, 2]]
