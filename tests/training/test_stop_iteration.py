"""StopIteration of the user's code is an error, not the end of the data."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

X, Y = np.zeros((32, 4), np.float32), np.ones((32, 1), np.float32)


class Empty(keras.callbacks.Callback):
    """Calls next() on what is empty."""

    def __init__(self, hook, batch=2):
        super().__init__()
        self.hook, self.batch = hook, batch

    def _call(self, name, batch):
        if name == self.hook and batch >= self.batch:
            next(iter(()))

    def on_train_batch_begin(self, batch, logs=None):
        self._call("on_train_batch_begin", batch)

    def on_train_batch_end(self, batch, logs=None):
        self._call("on_train_batch_end", batch)

    def on_test_batch_end(self, batch, logs=None):
        self._call("on_test_batch_end", batch)

    def on_predict_batch_begin(self, batch, logs=None):
        self._call("on_predict_batch_begin", batch)

    def on_epoch_end(self, epoch, logs=None):
        self._call("on_epoch_end", self.batch)


class OwnStep(keras.Model):
    """A step that calls next() on what is empty."""

    def __init__(self, *args, name_of_step="train_step", **kwargs):
        super().__init__(*args, **kwargs)
        self.name_of_step = name_of_step

    def train_step(self, data):
        return super().train_step(data) if self.name_of_step != "train_step" else next(iter(()))

    def test_step(self, data):
        return super().test_step(data) if self.name_of_step != "test_step" else next(iter(()))

    def predict_step(self, data):
        return super().predict_step(data) if self.name_of_step != "predict_step" else next(iter(()))


def build(trainer, make=keras.Model, eagerly=False, **arguments):
    keras.backend.clear_session()
    with trainer.scope():
        inputs = keras.Input((4,))
        model = make(inputs, keras.layers.Dense(1)(inputs), **arguments)
        model.compile("sgd", "mse", run_eagerly=eagerly)
    return model


@pytest.fixture(scope="module")
def trainer(mirrored):
    return tfdist.Trainer(mirrored)


@pytest.fixture(scope="module")
def plain(trainer):
    return build(trainer)


def fit(trainer, model, **given):
    return trainer.fit(model, X, Y, batch_size=8, verbose=0, **given)


def test_of_a_callback(trainer, plain):
    model = plain
    validation = {"validation_data": (X, Y), "validation_batch_size": 8}
    for hook, batch, given in (
        ("on_train_batch_begin", 0, {}),
        ("on_train_batch_end", 2, {}),
        ("on_test_batch_end", 2, validation),
    ):
        callback = Empty(hook, batch)
        with pytest.raises(RuntimeError, match=rf"Empty\.{hook} raised StopIteration \(test_stop_iteration.py:\d+\)"):
            fit(trainer, model, callbacks=[callback], **given)
    with pytest.raises(RuntimeError, match=r"Empty\.on_test_batch_end raised StopIteration"):
        trainer.evaluate(model, X, Y, batch_size=8, verbose=0, callbacks=[Empty("on_test_batch_end")])
    with pytest.raises(RuntimeError, match=r"Empty\.on_predict_batch_begin raised StopIteration"):
        trainer.predict(model, X, batch_size=8, verbose=0, callbacks=[Empty("on_predict_batch_begin")])
    with pytest.raises(RuntimeError, match=r"Empty\.on_epoch_end raised StopIteration"):
        fit(trainer, model, callbacks=[Empty("on_epoch_end")])


class Forgetful(keras.callbacks.Callback):
    """Calls next() on what is empty for a backup within the training."""

    trained = False

    def on_train_batch_begin(self, batch, logs=None):
        self.trained = True

    def state_dict(self):
        return next(iter(())) if self.trained else {}

    def load_state_dict(self, state):
        pass


def test_of_a_callbacks_state(trainer, plain, tmp_path):
    backup = tfdist.BackupAndRestore(tmp_path / "backup", 2, save_before_preemption=False)
    with pytest.raises(RuntimeError, match=r"Forgetful\.state_dict raised StopIteration"):
        fit(trainer, plain, callbacks=[Forgetful(), backup])


@pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=pytest.mark.full)])
def test_of_a_step(trainer, eagerly):
    calls = {
        "train_step": lambda model: fit(trainer, model),
        "test_step": lambda model: trainer.evaluate(model, X, Y, verbose=0),
        "predict_step": lambda model: trainer.predict(model, X, verbose=0),
    }
    for name, call in calls.items():
        model = build(trainer, OwnStep, eagerly, name_of_step=name)
        with pytest.raises(RuntimeError, match=f"The model's {name} raised StopIteration"):
            call(model)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_without_a_batch_are_still_named(trainer, plain):
    with pytest.raises(tfdist.ConfigError, match="The training data hold no batch"):
        trainer.fit(plain, tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(0), verbose=0)
