"""What a training consists of can be taken between two steps, and put back."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.backup.state import TrainingState
from tfdist.errors import ConfigError


class Model(keras.Model):
    """Variables that Keras does not know, one of them a count of each replica's own, and a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(50, 4)
        self.norm = keras.layers.BatchNormalization()
        self.drop = keras.layers.Dropout(0.5)
        self.dense = keras.layers.Dense(1)
        self.raw = tf.Variable(3.0, trainable=False)
        self.seen = tf.Variable(0, trainable=False, name="seen")

    def call(self, x, training=False):
        context = tf.distribute.get_replica_context()
        if context:  # none while Keras builds it
            self.seen.assign_add(1 + tf.cast(context.replica_id_in_sync_group, tf.int32))
        return self.dense(self.drop(self.norm(tf.reduce_mean(self.embedding(x), 1)), training=training))


@pytest.fixture(scope="module")
def model(mirrored):
    mirrored.trainer = None  # of another test's, which would refuse the model
    keras.backend.clear_session()  # names start again
    keras.utils.set_random_seed(0)
    with mirrored.scope():
        model = Model()
        model.compile("adam", "mse", metrics=["mae"])
    train(model, 1)
    return model


def train(model, steps):
    rng = np.random.default_rng(steps)
    model.fit(rng.integers(0, 50, (8 * steps, 5)), rng.standard_normal((8 * steps, 1)), batch_size=8, verbose=0)


def numbers(taken):
    return {name: np.array(value) for part in taken for name, value in part.items()}


def test_what_is_taken_stays_as_it_was_while_the_training_goes_on(model):
    state = TrainingState(model, [])
    taken = state.capture()
    before = {name: value.copy() for name, value in numbers(taken).items()}
    train(model, 5)
    after = numbers(taken)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    now = numbers(state.capture())
    changed = [name for name in before if not np.array_equal(before[name], now[name])]
    assert len(changed) > 12, "but the variables are not as they were"


def test_what_is_put_back_is_as_it_was(model):
    state = TrainingState(model, [])
    taken = [{name: np.array(value) for name, value in part.items()} for part in state.capture()]
    train(model, 3)
    model.raw.assign(9.0)
    state.restore(*taken)
    now = numbers(state.capture())
    assert all(np.array_equal(value, now[name]) for part in taken for name, value in part.items())
    assert float(model.raw.numpy()) == 3.0


def test_each_replicas_own_values_are_its_own_and_all_else_is_shared(model):
    shared, own = TrainingState(model, []).capture()
    names = {name.split("/", 1)[1] for name in shared}
    assert {"model/embedding/embeddings", "adam/iteration", "adam/learning_rate"} <= names
    assert sum("momentum" in name or "velocity" in name for name in names) == 2 * 5
    kept = {name.split("/", 2)[2] for name in own if name.startswith("replica-") and name.count("/") > 1}
    assert kept >= {"model/batch_normalization/moving_mean", "seen:0", "mean_absolute_error/total"}
    assert any("seed_generator_state" in name for name in kept)
    seen = [int(value) for name, value in own.items() if "seen:0" in name]
    assert seen[1] == 2 * seen[0] > 0
    assert not names & kept


class Remembers(keras.callbacks.Callback):
    """A state of all kinds of values."""

    state = None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_callbacks_get_back_what_they_remember(model):
    first, second, stopping = Remembers(), Remembers(), keras.callbacks.EarlyStopping("loss")
    values = {
        "number": 0.1 + 0.2,
        "none": None,
        "list": [1, np.arange(3.0)],
        "deep": {"x": np.float32(0.1)},
        "nan": float("nan"),
        # As the state's own marks.
        "marks": [{"array:": "x"}, {"pairs:": []}, {"array:": "x", "y": 1}, {1: 2}],
    }
    first.state, second.state, stopping.wait, stopping.best = values, 7, 3, np.float64(0.25)
    stopping.best_weights = model.get_weights()
    state = TrainingState(model, [first, stopping, second])
    shared, own = state.capture()
    json.loads(own["rest"].numpy())
    weights, stopping.best_weights = stopping.best_weights, None
    first.state = second.state = stopping.best = None
    stopping.wait = 0
    state.restore({k: v.numpy() for k, v in shared.items()}, {k: v.numpy() for k, v in own.items()})
    assert (second.state, stopping.wait, stopping.best) == (7, 3, 0.25)
    assert all(np.array_equal(a, b) for a, b in zip(stopping.best_weights, weights, strict=True))
    got = first.state
    assert (got["number"], got["none"], got["deep"]["x"]) == (0.1 + 0.2, None, float(np.float32(0.1)))
    assert got["marks"] == values["marks"]
    assert np.array_equal(got["list"][1], np.arange(3.0)) and np.isnan(got["nan"])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"deep": [np.array([None, {}])]}, "/deep/0 is a ndarray"),
        (tf.ragged.constant([[1], [2, 3]]), "is a RaggedTensor"),
        ({1, 2}, "is a set"),
        (object(), "is a object"),
    ],
)
def test_what_cannot_be_stored_is_named(model, value, named):
    callback = Remembers()
    callback.state = value
    with pytest.raises(ConfigError, match=r"The state of callbacks cannot be backed up: .*Remembers") as refused:
        TrainingState(model, [callback]).capture()
    assert named in str(refused.value)


def test_a_callback_that_is_not_there_any_more_is_left_out(model):
    first = Remembers()
    first.state = 1
    shared, own = TrainingState(model, [first]).capture()
    TrainingState(model, []).restore({k: v.numpy() for k, v in shared.items()}, {k: v.numpy() for k, v in own.items()})


def test_a_scalar_weight_that_a_callback_holds_is_one_again(model):
    """`EarlyStopping(restore_best_weights=True)` sets weights to what it remembers; Keras reads the shape of each."""
    stopping = keras.callbacks.EarlyStopping(restore_best_weights=True)
    stopping.best_weights = [np.float32(3.5), np.zeros(2, "float32")]
    state = TrainingState(model, [stopping])
    taken = [{name: np.array(value) for name, value in part.items()} for part in state.capture()]
    stopping.best_weights = None
    state.restore(*taken)
    scalar, vector = stopping.best_weights
    assert (scalar.dtype, scalar.shape, scalar) == (np.float32, (), 3.5) and vector.shape == (2,)
