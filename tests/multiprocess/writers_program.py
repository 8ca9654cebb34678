"""Callbacks and methods that write files, and subclasses of callbacks that do more. Arguments: strategy, folder for the results."""

import os
import pathlib
import sys
import tempfile

import tfdist
from tests.multiprocess import harness
from tfdist.runtime import progress

trainer = tfdist.Trainer(sys.argv[1])

import keras  # noqa: E402 (the strategy comes first)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist import config  # noqa: E402
from tfdist.commands import train  # noqa: E402
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


class Own(keras.callbacks.Callback):
    """A writer of your own, which says where it writes."""

    writes = "path"

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch, logs=None):
        with open(self.path, "a") as file:
            file.write(f"rank {RANK}\n")


class OwnPredicts(Own):
    def on_epoch_end(self, epoch, logs=None):
        self.found = self.model.predict(x, verbose=0)
        super().on_epoch_end(epoch, logs)


class SaysSo(keras.callbacks.CSVLogger):
    """Overrides a hook, and says that it only writes all the same."""

    writes = "filename"

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, {"rank": RANK})


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
        Own(OUT / "own.txt"),
        OwnPredicts(OUT / "own_predicts.txt"),
        SaysSo(OUT / "says_so.csv"),
    ]


def kept(callbacks):
    _, mine, _ = callback_sync.wrap_callbacks(callbacks, trainer.strategy, trainer._context.ranks, check_weights=True)
    return [type(each).__name__ for each in mine]


def fitted():
    callbacks = made()
    model = fit(callbacks)
    kinds = (Predicts, Evaluates, Looks, OwnPredicts)
    predicts, evaluates, looks, own = (next(c for c in callbacks if isinstance(c, kind)) for kind in kinds)
    return {
        "predicted": (predicts.found, model.predict(x, verbose=0)),
        "predicted by your own": (own.found, model.predict(x, verbose=0)),
        "evaluated": (evaluates.found, model.evaluate(x, y, verbose=0)),
        "looked": looks.found,
        "places": [predicts.log_dir, evaluates.filepath, looks.filename, own.path],
        "left": [str(path) for path in pathlib.Path(progress.task_files() or tempfile.tempdir).rglob("*")],
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


def keras_backup():
    """Returns what stands in the folder of Keras' own callback while training goes on, and after it."""
    folder, seen = OUT / "keras_backup", []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(sorted(path.name for path in folder.glob("*")))
    )
    fit([keras.callbacks.BackupAndRestore(folder, save_freq=1), keep])
    return seen, sorted(path.name for path in folder.glob("step-*"))


def backups_left():
    """Returns what is left of the backups of a fit after some ranks, or those in a callback, have saved its model."""
    left = {}
    for name, ranks in {"all": (0, 1), "chief": (0,), "worker": (1,)}.items():
        folder = OUT / "backups_left" / name
        with trainer.scope():
            model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[tfdist.BackupAndRestore(folder)])
        if RANK in ranks:
            model.save(OUT / "backups_left" / f"{name}.keras")
        model.evaluate(x, y, verbose=0)  # once all ranks have saved
        left[name] = sorted(path.name for path in folder.rglob("*") if path.is_file())
    return left


def saved_by_all():
    """Every rank saves to the same paths, and loads from them at once. Returns what was not as it was saved, and the files."""
    folder, wrong = OUT / "saved_by_all", []
    with trainer.scope():
        layers = [keras.Input((12,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
    checkpoint = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), folder / "managed", max_to_keep=1)

    def check(name, expected, got):
        if not all(np.allclose(*pair, atol=1e-6) for pair in zip(expected, got, strict=True)):
            wrong.append(name)

    for number in range(2):  # the second time the files are there
        model.fit(x, y, batch_size=16, verbose=0)
        weights = model.get_weights()
        predicted = model.predict(x, verbose=0)
        model.export(folder / "exported", verbose=False)
        loaded = tf.saved_model.load(folder / "exported")
        check(f"exported {number}", [predicted], [loaded.serve(x).numpy()])
        for name, save, load in (
            ("weights", lambda: model.save_weights(folder / "a.weights.h5"), model.load_weights),
            ("written", lambda: checkpoint.write(folder / "written"), lambda path: checkpoint.read(path)),
            ("saved", lambda: checkpoint.save(folder / "saved"), checkpoint.restore),
            ("managed", manager.save, checkpoint.restore),
        ):
            path = save() or folder / "a.weights.h5"
            for variable in model.variables:
                variable.assign(tf.zeros_like(variable))
            load(path)
            check(f"{name} {number}", weights, model.get_weights())
    trainer._context.ranks.gather(0.0)  # until the other, too, has done its last
    return wrong, sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


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


def unsupervised(function):
    """Calls a function without the supervisor, which would remove backups once all tasks have ended."""
    folder = os.environ.pop(progress.FOLDER)
    try:
        return function()
    finally:
        os.environ[progress.FOLDER] = folder


results = {
    "keras_backup": unsupervised(keras_backup),
    "kept": kept(made()),
    "on instance": kept(
        [keras.callbacks.CSVLogger(OUT / "a.csv"), vars(c := Renamed(OUT / "a")).update(on_epoch_end=print) or c]
    ),
    **fitted(),
    "sent": sent(),
    "spoiled": spoiled(),
    "spoiled, and not checked": spoiled(checks=False),
    "command": command(),
    "saved by all": saved_by_all(),
    "backups left": unsupervised(backups_left),
}
harness.store(sys.argv[2], RANK, results)
