"""The field `callbacks`."""

import contextlib
import inspect
import re

import keras
import pytest

from tfdist.config import TrainConfig, callbacks
from tfdist.errors import ConfigError
from tfdist.training.configured import MonitoredMetrics, build_callbacks


class Counting(keras.callbacks.Callback):
    def __init__(self, step=1):
        super().__init__()
        self.step = step


@pytest.mark.parametrize("name", callbacks.CALLBACKS)
def test_each_takes_what_its_class_takes(name):
    takes = set(inspect.signature(getattr(keras.callbacks, name).__init__).parameters) - {"self", "kwargs"}
    assert {*callbacks.CALLBACKS[name]} == takes, "a release of Keras has changed them: mend CALLBACKS"


def test_callbacks_are_made_with_their_arguments():
    text = f"EarlyStopping(monitor=val_loss, patience=3, baseline=-1e-3, mode='min'); {__name__}:Counting(step=2);"
    monitored, stopping, counting, plain = build_callbacks(TrainConfig(callbacks=f"{text} {__name__}:Counting"))
    assert type(monitored) is MonitoredMetrics, "before Keras' own, which only warn"
    assert type(stopping) is keras.callbacks.EarlyStopping and type(counting) is Counting
    assert (stopping.monitor, stopping.patience, stopping.baseline) == ("val_loss", 3, -1e-3)
    assert (counting.step, plain.step) == (2, 1)
    assert build_callbacks(TrainConfig()) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no.such:Thing", "The module of callback 'no.such:Thing' cannot be found"),
        (f"{__name__}:Thing", f"Module '{__name__}' has no 'Thing'"),
        (f"{__name__}:Counting(steps=1)", f"callback '{__name__}:Counting' cannot be made of .*'steps'"),
        (f"{__name__}:inspect", f"callback '{__name__}:inspect' cannot be made of"),
        (f"{__name__}:dict", "has no 'dict'"),
        ("builtins:dict", "callback 'builtins:dict' must return a keras.callbacks.Callback. Received: {}."),
        (
            "CSVLogger(filename='/proc/log.csv')",
            "filename of CSVLogger must be a file that can be written. Received: '/",
        ),
        (
            "ModelCheckpoint(filepath='/dev/null/{epoch}.keras')",
            "filepath of ModelCheckpoint must be a file that can be written. Received: '/dev/null",
        ),
    ],
)
def test_what_only_shows_later_is_one_sentence(text, said):
    with pytest.raises(ConfigError, match=said):
        build_callbacks(TrainConfig(callbacks=text))


@pytest.mark.parametrize(
    ("monitor", "logs", "said"),
    [
        ("val_acc", {"loss": 1.0, "accuracy": 0.5}, "'val_acc'; did you mean 'val_accuracy'?"),
        ("acc", {"loss": 1.0, "accuracy": 0.5}, "unknown metric of callback EarlyStopping 'acc'"),
        ("val_accuracy", {"loss": 1.0, "accuracy": 0.5}, ""),
        ("learning_rate", {"loss": 1.0}, ""),
    ],
)
def test_a_metric_that_no_step_reports_ends_the_training_at_its_first_step(monitor, logs, said):
    monitored, *_ = build_callbacks(TrainConfig(callbacks=f"EarlyStopping(monitor={monitor})"))
    monitored.set_model(keras.Sequential())
    with pytest.raises(ConfigError, match=re.escape(said)) if said else contextlib.nullcontext():
        monitored.on_train_batch_end(0, logs)


def test_a_metric_of_the_users_own_step_is_missed_after_the_first_epoch_that_is_validated():
    monitored = MonitoredMetrics([("EarlyStopping", "val_own"), ("EarlyStopping", "own")], at_once=False)
    monitored.set_model(keras.Sequential())
    monitored.on_train_batch_end(0, {"loss": 1.0})
    monitored.on_epoch_end(0, {"loss": 1.0, "own": 2.0})
    with pytest.raises(ConfigError, match="unknown metric of callback EarlyStopping 'val_own'"):
        monitored.on_epoch_end(1, {"loss": 1.0, "own": 2.0, "val_loss": 1.0})
