"""Callbacks that write files, and subclasses of them that do more. Arguments: strategy, folder for the results."""

import pathlib
import sys
import tempfile

import tfdist
from tests.multiprocess import harness

trainer = tfdist.Trainer(sys.argv[1])

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402

from tfdist import config, train  # noqa: E402
from tfdist.training import callback_sync  # noqa: E402

RANK = trainer.task.index
OUT = pathlib.Path(sys.argv[2])
x = np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32)
y = x[:, :1]
tempfile.tempdir = str(OUT / f"temporary{RANK}")
pathlib.Path(tempfile.tempdir).mkdir()


class Renamed(keras.callbacks.CSVLogger):
    pass


class Predicts(keras.callbacks.TensorBoard):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.found = self.model.predict(x, verbose=0)


class Evaluates(keras.callbacks.ModelCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.found = self.model.evaluate(x, y, verbose=0)


class Looks(keras.callbacks.CSVLogger):
    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.found = self.filename


class Sends(keras.callbacks.RemoteMonitor):
    def on_train_begin(self, logs=None):
        self.found = self.root


class Spoils(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if RANK == 1:
            self.model.layers[0].bias.assign([epoch + 5.0])


def fit(callbacks):
    with trainer.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    trainer.fit(model, x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    return model


def made():
    return [
        keras.callbacks.CSVLogger(OUT / "plain.csv"),
        Renamed(OUT / "renamed.csv"),
        keras.callbacks.TensorBoard(OUT / "plain"),
        keras.callbacks.ModelCheckpoint(OUT / "plain.keras"),
        Predicts(OUT / "predicts"),
        Evaluates(OUT / "{epoch}.keras"),
        Looks(OUT / "looks.csv"),
        keras.callbacks.EarlyStopping("loss"),
    ]


def kept(callbacks):
    wrapped = callback_sync.wrap_callbacks(callbacks, trainer.strategy, trainer._context.ranks, check_weights=True)
    return [type(each).__name__ for each in wrapped[1:-1]]


def fitted():
    callbacks = made()
    model = fit(callbacks)
    predicts, evaluates, looks = (next(c for c in callbacks if isinstance(c, k)) for k in (Predicts, Evaluates, Looks))
    return {
        "predicted": (predicts.found, model.predict(x, verbose=0)),
        "evaluated": (evaluates.found, model.evaluate(x, y, verbose=0)),
        "looked": looks.found,
        "places": [predicts.log_dir, evaluates.filepath, looks.filename],
        "left": [str(path) for path in pathlib.Path(tempfile.tempdir).rglob("*")],
    }


def sent():
    sends = Sends("http://127.0.0.1:9")
    sends.on_epoch_end = lambda epoch, logs: None
    fit([sends])
    return sends.found, sends.root


def spoiled(checks=True):
    trainer._context.check_weights = checks
    try:
        fit([keras.callbacks.CSVLogger(OUT / "spoiled.csv"), Spoils()])
    except tfdist.ClusterError as e:
        return str(e)
    return ""


class RankRate(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.01 * (1 + RANK)

    def get_config(self):
        return {}


def unlike_optimizer(learning_rate, **_):
    return keras.optimizers.SGD(RankRate())


def command():
    """The command gives the chief alone a callback that writes scalars. Weights are compared at the end alone."""
    optimizer = config.OptimizerConfig("__main__:unlike_optimizer")
    job = config.TrainConfig("digits", optimizer=optimizer, global_batch_size=64, steps_per_epoch=2, epochs=1)
    try:
        train.train(job, OUT / "command", trainer)
    except tfdist.ClusterError as e:
        return str(e)
    return ""


results = {
    "kept": kept(made()),
    "on instance": kept(
        [keras.callbacks.CSVLogger(OUT / "a.csv"), vars(c := Renamed(OUT / "a")).update(on_epoch_end=print) or c]
    ),
    **fitted(),
    "sent": sent(),
    "spoiled": spoiled(),
    "spoiled, and not checked": spoiled(checks=False),
    "command": command(),
}
harness.store(sys.argv[2], RANK, results)
