"""Tasks that return values of a wrong kind: one sentence each. Errors of Keras and of the task keep their tracebacks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.config import BackupConfig, TrainConfig
from tfdist.errors import ConfigError
from tfdist.tasks.digits import Digits

IMAGES, LABELS = np.zeros((16, 8, 8, 1), "float32"), np.zeros(16, "int32")


def dataset(*parts):
    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0])


def mine(labels, predictions):
    raise ValueError("mine")


def returning(method, value):
    return type("Own", (Digits,), {method: lambda self, *arguments: value() if callable(value) else value})


ROWS = [
    ("build_model", None, "build_model of task .* must return a keras.Model. Received: None."),
    ("build_model", lambda: keras.layers.Dense(3), "must return a keras.Model. Received: <Dense"),
    ("compile_arguments", [], "compile_arguments of task .* must return a dict. Received: \\[\\]."),
    ("compile_arguments", {"optimizer": "sgd"}, "must leave out 'optimizer', which the configuration sets"),
    ("compile_arguments", {"loss": "mse", "los": 1}, "unknown argument in compile_arguments .* did you mean 'loss'"),
    ("train_data", None, "train_data of task .* must return a tf.data.Dataset. Received: 'NoneType'."),
    ("train_data", lambda: IMAGES, "train_data of task .* must return a tf.data.Dataset. Received: 'ndarray'."),
    (
        "eval_data",
        lambda: dataset(IMAGES, LABELS).batch(8).repeat(),
        "eval_data of task .* must return a dataset that ends",
    ),
    ("eval_data", "text", "eval_data of task .* must return a tf.data.Dataset or None. Received: 'str'."),
    (
        "steps_per_epoch",
        "many",
        "steps_per_epoch of task .* must return a whole number of steps, or None. Received: 'ma",
    ),
]


@pytest.mark.parametrize(("method", "value", "said"), ROWS)
def test_what_cannot_be_trained_is_a_sentence(monkeypatch, tmp_path, method, value, said):
    if method == "compile_arguments":
        given = value
        value = lambda: given  # noqa: E731 (its values may be functions)
    with pytest.raises(ConfigError, match=said) as raised:
        run(monkeypatch, tmp_path, returning(method, value), 0 if method == "steps_per_epoch" else 2)
    (fault,) = raised.value.faults
    assert fault.isprintable() and len(fault) < 900


def test_a_task_that_takes_no_options_is_a_sentence(monkeypatch, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"the constructor of task .* must accept the options, as that of tfdist.Task does: TypeError: ",
    ):
        run(monkeypatch, tmp_path, type("Own", (Digits,), {"__init__": lambda self: None}), 2)


@pytest.mark.parametrize(("arguments", "told"), [({"loss": mine}, "mine"), ({}, "No loss to compute")])
def test_errors_of_the_first_step_keep_their_tracebacks(monkeypatch, tmp_path, arguments, told):
    with pytest.raises(ValueError, match=told) as raised:
        run(monkeypatch, tmp_path, returning("compile_arguments", lambda: arguments), 2)
    assert not isinstance(raised.value, ConfigError)


def run(monkeypatch, folder, task, steps):
    monkeypatch.setitem(globals(), "Own", task)
    config = TrainConfig(
        f"{__name__}:Own", None, global_batch_size=8, steps_per_epoch=steps, backup=BackupConfig("never")
    )
    config.choose_task(config.task)
    tfdist.run(config, folder)
