"""The chief alone writes files; a subclass of a writer that does more than that runs on all workers."""

import contextlib
import os
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases.arms import WORKERS
from tests.cases.case import case
from tfdist import config
from tfdist.runtime.folders import claim
from tfdist.runtime.report import progress
from tfdist.training import run
from tfdist.training.prepared_run import PreparedRun

X = np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32)
Y = X[:, :1]


class Renamed(keras.callbacks.CSVLogger):
    pass


class Predicts(keras.callbacks.TensorBoard):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.found = self.model.predict(X, verbose=0)


class Evaluates(keras.callbacks.ModelCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.found = self.model.evaluate(X, Y, verbose=0)


class Looks(keras.callbacks.CSVLogger):
    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.found = self.filename


class Own(keras.callbacks.Callback):
    """A writer of your own, which says where it writes."""

    writes = "path"

    def __init__(self, path, rank):
        super().__init__()
        self.path, self.rank = path, rank

    def on_epoch_end(self, epoch, logs=None):
        with open(self.path, "a") as file:
            file.write(f"rank {self.rank}\n")


class OwnPredicts(Own):
    def on_epoch_end(self, epoch, logs=None):
        self.found = self.model.predict(X, verbose=0)
        super().on_epoch_end(epoch, logs)


class SaysSo(keras.callbacks.CSVLogger):
    """Overrides a hook, and says that it only writes all the same."""

    writes = "filename"
    rank = 0

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, {"rank": self.rank})


def fit(world, callbacks, trainer=None):
    with (trainer or world.trainer).scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
    return model


@contextlib.contextmanager
def temporary_folder(path):
    before, tempfile.tempdir = tempfile.tempdir, str(path)
    path.mkdir()
    try:
        yield
    finally:
        tempfile.tempdir = before


@case(WORKERS)
def writers_and_subclasses_that_do_more(world):
    out, temporary = world.folder, world.folder / f"temporary{world.rank}"
    predicts, evaluates, looks = (
        Predicts(out / "predicts"),
        Evaluates(out / "{epoch}.keras"),
        Looks(out / "looks.csv"),
    )
    own, own_predicts = Own(out / "own.txt", world.rank), OwnPredicts(out / "own_predicts.txt", world.rank)
    says_so = SaysSo(out / "says_so.csv")
    says_so.rank = world.rank
    left_out = [
        keras.callbacks.CSVLogger(out / "plain.csv"),
        Renamed(out / "renamed.csv"),
        keras.callbacks.TensorBoard(out / "plain"),
        keras.callbacks.ModelCheckpoint(out / "plain.keras"),
        own,
        says_so,
    ]
    overridden = Renamed(out / "overridden.csv")
    epochs = []
    overridden.on_epoch_end = lambda epoch, logs: epochs.append(epoch)  # so it runs on all workers
    early = keras.callbacks.EarlyStopping("loss")
    with temporary_folder(temporary):
        model = fit(world, [*left_out, predicts, evaluates, looks, own_predicts, overridden, early])
        world.gather()  # the tasks share the supervisor's folder
        left = [str(path) for path in pathlib.Path(progress.task_files() or temporary).rglob("*")]
    is_chief = world.rank == 0
    rows = [row.split(",")[:2] for row in (out / "says_so.csv").read_text().splitlines()]
    ran = [getattr(each, "model", None) is not None for each in left_out]
    return {
        "run on": (ran, [is_chief] * len(left_out)),
        "epochs": (epochs, [0, 1]),
        "predicted": (predicts.found, model.predict(X, verbose=0)),
        "predicted by your own": (own_predicts.found, model.predict(X, verbose=0)),
        "evaluated": (evaluates.found, model.evaluate(X, Y, verbose=0)),
        "models": (sorted(path.name for path in out.glob("*.keras")), ["1.keras", "2.keras", "plain.keras"]),
        "lines": (len((out / "looks.csv").read_text().splitlines()), 3),
        "files of TensorBoard": (len(list((out / "predicts" / "train").iterdir())), 1),
        "own": ((out / "own.txt").read_text(), "rank 0\n" * 2),
        "own predicts": ((out / "own_predicts.txt").read_text(), "rank 0\n" * 2),
        "says so": (rows, [["epoch", "rank"], ["0", "0"], ["1", "0"]]),
        # A worker writes into the supervisor's temporary folder, which goes with it; afterwards it has the chief's places.
        "given": (looks.found == str(out / "looks.csv"), is_chief),
        "temporary": ("/files/tfdist-" in looks.found, not is_chief),
        "places": (
            [str(each) for each in (predicts.log_dir, evaluates.filepath, looks.filename, own_predicts.path)],
            [str(out / name) for name in ("predicts", "{epoch}.keras", "looks.csv", "own_predicts.txt")],
        ),
        "left": (left, []),
    }


@case(WORKERS)
def the_chief_alone_sends_to_a_server(world):
    class Sends(keras.callbacks.RemoteMonitor):
        def on_train_begin(self, logs=None):
            self.found = self.root

    sends = Sends("http://127.0.0.1:9")
    sends.on_epoch_end = lambda epoch, logs: None
    fit(world, [sends])
    right = "http://127.0.0.1:9" if world.rank == 0 else "no address"
    return {"during": (sends.found[: len(right)], right), "after": (sends.root, "http://127.0.0.1:9")}


@contextlib.contextmanager
def unsupervised():
    """Without the supervisor, which would remove backups once all tasks have ended."""
    removed = {name: os.environ.pop(name) for name in (progress.FOLDER, claim.JOB)}
    try:
        yield
    finally:
        os.environ.update(removed)


@case(WORKERS)
def keras_own_backups_are_replaced(world):
    folder, seen = world.folder / "keras_backup", []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.extend(path.name for path in folder.glob("*"))
    )
    with unsupervised():
        fit(world, [keras.callbacks.BackupAndRestore(folder, save_freq=1), keep])
    return {
        "steps": (any(name.startswith("step-") for name in seen), True),
        "Keras' own": ("latest.weights.h5" in seen, False),
        "after": (len([*folder.glob("step-*")]), 0),
    }


@case(WORKERS)
def the_chief_that_saves_the_model_removes_the_backups_of_all_ranks_and_no_worker_does(world):
    left = {}
    with world.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    with unsupervised():
        for name, ranks in {"all": (0, 1), "chief": (0,), "worker": (1,)}.items():
            folder = world.folder / "backups" / name
            model.fit(X, Y, batch_size=16, verbose=0, callbacks=[tfdist.BackupAndRestore(folder)])
            if world.rank in ranks:
                model.save(world.folder / f"{name}.keras")
            model.evaluate(X, Y, verbose=0)  # once all ranks have saved
            left[name] = {path.name for path in folder.rglob("*") if path.is_file()}
    return {
        "all": (len(left["all"]), 0),
        "chief": (len(left["chief"]), 0),
        "worker": (left["worker"] >= {"manifest.json", "rank-1.index"}, True),
    }


def fit_spoiled(world, check_weights):
    """Changes the weights of one worker, and lets the other one write."""

    class Spoils(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if world.rank == 1:
                self.model.layers[0].bias.assign([epoch + 5.0])

    trainer = tfdist.Trainer(world.trainer.strategy, check_weights=check_weights)
    fit(world, [keras.callbacks.CSVLogger(world.folder / "spoiled.csv"), Spoils()], trainer)


# Workers that leave a writer out have the same callbacks all the same.
SPOILED = r"(?s)ClusterError: .*must be the same on all tasks. Received: checksum.*They were compared "


@case(WORKERS, error=rf"{SPOILED}after epoch 1\.")
def weights_that_differ_beside_a_writer(world):
    fit_spoiled(world, check_weights=True)


@case(WORKERS, error=rf"{SPOILED}at the end of the training\.")
def weights_that_differ_beside_a_writer_without_checks(world):
    fit_spoiled(world, check_weights=False)


class RankRate(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def __call__(self, step):
        return self.rate

    def get_config(self):
        return {}


def unlike_optimizer(learning_rate, **_):
    return keras.optimizers.SGD(RankRate(float(os.environ["RATE_OF_TEST"])))


@case(WORKERS, error=r"(?s)ClusterError: .*They were compared at the end of the training\.")
def the_commands_scalars_do_not_hide_that_weights_differ(world):
    """The command gives the chief alone a callback that writes scalars. Weights are compared at the end alone."""
    os.environ["RATE_OF_TEST"] = str(0.01 * (1 + world.rank))
    optimizer = config.OptimizerConfig(f"{__name__}:unlike_optimizer")
    job = config.TrainConfig("digits", optimizer=optimizer, global_batch_size=64, steps_per_epoch=2, epochs=1)
    trainer = tfdist.Trainer(world.trainer.strategy, check_weights=False)
    prepared = PreparedRun(job, world.folder / "command", overwrite=False)
    with prepared.claim():
        run.train(prepared, trainer=trainer)


@case(WORKERS)
def what_all_save_to_one_path_is_whole_whenever_it_is_read(world):
    """Every rank saves to the same paths, and loads from them at once."""
    folder, pairs = world.folder / "saved", {}
    with world.scope():
        layers = [keras.Input((12,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
    checkpoint = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), folder / "managed", max_to_keep=1)
    for number in range(2):  # the second time the files are there
        model.fit(X, Y, batch_size=16, verbose=0)
        weights, predicted = model.get_weights(), model.predict(X, verbose=0)
        model.export(folder / "exported", verbose=False)
        loaded = tf.saved_model.load(folder / "exported")  # its variables live as long as it does
        pairs[f"exported {number}"] = loaded.serve(X), predicted
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
            pairs[f"{name} {number}"] = model.get_weights(), weights
    world.gather()  # until the other, too, has done its last
    data = [".data-00000-of-00001", ".index"]
    right = ["a.weights.h5", "checkpoint", "managed/checkpoint"]
    right += [
        "exported/fingerprint.pb",
        "exported/saved_model.pb",
        *(f"exported/variables/variables{end}" for end in data),
    ]
    right += [name + end for name in ("managed/ckpt-2", "saved-1", "saved-2", "written") for end in data]
    found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return {**pairs, "files": (sorted(found), sorted(right))}
