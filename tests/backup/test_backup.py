"""`BackupAndRestore` in one process with two replicas: what was interrupted ends as if it had not been."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context as eager_context

import tfdist
from tests.helpers import tiers
from tests.helpers.launched_job import until
from tests.helpers.reused_model import ReusedModel
from tests.multiprocess.test_backup import differences
from tfdist import BackupError, ConfigError, data
from tfdist.backup import callback
from tfdist.backup.storage import Storage
from tfdist.compression.error_feedback import ErrorFeedback
from tfdist.compression.per_variable import PerVariable
from tfdist.compression.powersgd import PowerSGD
from tfdist.compression.topk import TopK
from tfdist.runtime.folders import claim, finished_training
from tfdist.runtime.folders.claim import Claim

EXAMPLES, BATCH = 80, 16
STEPS = EXAMPLES // BATCH
rng = np.random.default_rng(0)
X = rng.standard_normal((EXAMPLES, 6), np.float32)
Y = rng.integers(0, 3, EXAMPLES).astype(np.int32)


class Interrupted(Exception):
    """In place of a kill."""


class Interrupt(keras.callbacks.Callback):
    """Interrupts at the end of the number-th step of this life, or amid the number-th validation."""

    def __init__(self, step=None, validation=None):
        super().__init__()
        self.steps, self.validations = step, validation
        self.batches = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append((self.epoch, batch))
        if self.steps is not None:
            self.steps -= 1
            if self.steps == 0:
                raise Interrupted

    def on_test_batch_begin(self, batch, logs=None):
        if self.validations is not None:
            self.validations -= 1
            if self.validations == 0:
                raise Interrupted


class Counter(keras.callbacks.Callback):
    """A user's callback with a state of its own."""

    def __init__(self):
        super().__init__()
        self.seen, self.total = 0, np.zeros(2)

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        self.total += logs["loss"]

    def state_dict(self):
        return {"seen": self.seen, "total": self.total}

    def load_state_dict(self, state):
        self.seen, self.total = state["seen"], state["total"]


@pytest.fixture
def trainer(mirrored):
    return tfdist.Trainer(mirrored)  # another test may have made one of this strategy since


@pytest.fixture(autouse=True)
def listener():
    """Gives pytest its SIGTERM back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, before)


def plain():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def generator():
    while True:
        for start in range(0, EXAMPLES, BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]


DATA = {
    "function": lambda: {"x": lambda c: data.epochs((X, Y), c, BATCH, 5), "steps_per_epoch": STEPS},
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "dataset": lambda: {"x": plain().shuffle(40).batch(BATCH)},
    "unknown": lambda: {"x": plain().shuffle(40).filter(lambda *_: True).batch(BATCH)},
    "endless": lambda: {"x": plain().shuffle(40).repeat().batch(BATCH), "steps_per_epoch": STEPS - 1},
    "several_epochs_a_pass": lambda: {"x": plain().shuffle(40).repeat(2).batch(BATCH), "steps_per_epoch": STEPS},
    "finite_function": lambda: {"x": lambda c: plain().shuffle(40).batch(BATCH // 2)},
    "generator": lambda: {"x": generator(), "steps_per_epoch": STEPS},
}


# Each costs some seconds, and what they share with the others is much.
SLOW = ("arrays", "several_epochs_a_pass", "generator", "endless", "finite_function", "executions", "schedule")
SLOW += ("executions_that_do_not_divide", "metrics_with_state", "loss_scale")


_reused: dict[object, ReusedModel] = {}


def reuse(key, make):
    """Returns the model that `make` has made for this key, as it was at first."""
    if key not in _reused:
        keras.backend.clear_session()  # names as in another process
        keras.utils.set_random_seed(3)
        _reused[key] = ReusedModel(make())
    keras.utils.set_random_seed(3)
    return _reused[key].reset()


def build(trainer, compression=None, **built):
    trainer.compression = compression
    if compression is None:
        return reuse(("model", *sorted(built.items())), lambda: make_model(trainer, **built))
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    return make_model(trainer, **built)


def make_model(trainer, optimizer=None, units=8, state=True, **compiled):
    with trainer.scope():
        layers = [keras.layers.BatchNormalization(momentum=0.8), keras.layers.Dropout(0.3)] if state else []
        hidden = keras.layers.Dense(units, use_bias=False)
        model = keras.Sequential([keras.Input((6,)), hidden, *layers, keras.layers.Dense(3)])
        optimizer = optimizer() if optimizer else keras.optimizers.Adam(0.01)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        compiled = {name: value() if callable(value) else value for name, value in compiled.items()}
        model.compile(optimizer, loss, **{"metrics": ["accuracy"], **compiled})
    return model


def life(trainer, backup, interrupt=None, given="function", epochs=3, callbacks=(), validation=None, **built):
    """Trains until the interruption or the end; returns all that must be equal then, or None."""
    model = build(trainer, **built)
    interrupt = interrupt or Interrupt()
    stopping = keras.callbacks.EarlyStopping("loss", min_delta=0.1, patience=30, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05)
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    counter = Counter()
    mine = [stopping, plateau, decay, counter, *callbacks, interrupt]
    try:
        history = trainer.fit(
            model,
            **DATA[given](),
            epochs=epochs,
            validation_data=validation,
            verbose=0,
            callbacks=[*mine, *([backup] if backup else [])],
        )
    except Interrupted:
        return None, interrupt.batches
    local = trainer.strategy.experimental_local_results
    held = [*model.variables, *model.optimizer.variables]
    return {
        "history": history.history,
        "epochs": history.epoch,
        "variables": [[component.numpy() for component in local(v.value)] for v in held],
        "stopping": [stopping.wait, stopping.best, stopping.best_epoch, stopping.best_weights],
        "plateau": [plateau.wait, plateau.best],
        "counter": [counter.seen, counter.total],
    }, interrupt.batches


@pytest.fixture(scope="module")
def undisturbed(mirrored):
    """What `life` trains if nothing is said and nothing interrupts."""
    return life(tfdist.Trainer(mirrored), None)[0]


def make_line(trainer):
    with trainer.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit_line(trainer, *callbacks, epochs=2, seed=3, **how):
    """Trains a model of one layer, for tests of when backups are written and removed, and returns it."""
    trainer.compression = None
    model = reuse("line", lambda: make_line(trainer))
    keras.utils.set_random_seed(seed)
    trainer.fit(model, **DATA["function"](), epochs=epochs, verbose=0, callbacks=[*callbacks], **how)
    return model


def backup(folder, save_freq=3, **how):
    return tfdist.BackupAndRestore(folder / "backup", save_freq, **{"save_before_preemption": False, **how})


def check_equal(trainer, tmp_path, interrupts, save_freq=3, **how):
    """Compares a training that was interrupted with one that was not."""
    expected, all_steps = life(trainer, None, **how)
    seen = []
    for interrupt in interrupts:
        ended, steps = life(trainer, backup(tmp_path, save_freq), interrupt, **how)
        assert ended is None, "it was interrupted"
        seen.append(steps)
    results, steps = life(trainer, backup(tmp_path, save_freq), **how)
    assert steps == all_steps[-len(steps) :], (
        "the hooks of the last life are those of the last steps, with their numbers"
    )
    assert len(steps) < len(all_steps)
    for before, after in zip(seen, [*seen[1:], steps], strict=True):
        assert not after or all_steps.index(after[0]) <= all_steps.index(before[-1]) + 1, "no step is left out"
    assert differences(results, expected) == []
    return seen, steps


def test_keras_own_callback_is_replaced(trainer, tmp_path, capsys):
    folder = tmp_path / "backup"

    def of_keras():
        return keras.callbacks.BackupAndRestore(folder, save_freq=3)

    expected, all_steps = life(trainer, None, given="dataset")
    ended, before = life(trainer, of_keras(), Interrupt(step=8), given="dataset")
    assert ended is None and [path.name for path in sorted(folder.glob("step-*"))] == ["step-3", "step-6"]
    results, steps = life(trainer, of_keras(), given="dataset")
    assert (steps, before) == (all_steps[6:], all_steps[:8]), "goes on where Keras' would begin the epoch anew"
    assert differences(results, expected) == []
    assert not [*folder.glob("step-*")], "removed when fit ends, as by Keras"
    assert "replaces keras.callbacks.BackupAndRestore" in capsys.readouterr().out
    fit_line(trainer, keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False), epochs=1)
    assert [*folder.glob("fit-2/step-*")], "a second fit of this program"


def test_keras_own_callback_is_left_out_beside_a_backup(trainer, tmp_path, capsys):
    fit_line(trainer, keras.callbacks.BackupAndRestore(tmp_path / "other"), backup(tmp_path), epochs=1)
    assert not (tmp_path / "other").exists() and [*(tmp_path / "backup").glob("step-*")]
    assert "skipped keras.callbacks.BackupAndRestore" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says so of data of unknown size
@pytest.mark.parametrize("given", tiers.cases(DATA, slow=SLOW))  # test_keras_own_callback_is_replaced has "dataset"
def test_training_goes_on_in_the_middle_of_an_epoch(trainer, tmp_path, given):
    check_equal(trainer, tmp_path, [Interrupt(step=8)], given=given)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("given", tiers.cases(["function", "unknown"], slow=["function"]))
def test_training_goes_on_after_the_last_step_of_an_epoch(trainer, tmp_path, given):
    # In a validation: the steps are done, the epoch is not.
    seen, last = check_equal(
        trainer, tmp_path, [Interrupt(validation=2)], save_freq=STEPS, given=given, validation=(X[:24], Y[:24])
    )
    assert (len(seen[0]), last[0]) in [(STEPS, (1, 0)), (2 * STEPS, (2, 0))], "not a step is repeated"


# Or the process, which here goes on, would be ended when the grace is over.
PREEMPTED = {"save_before_preemption": True, "grace_seconds": 36_000}


class Told(keras.callbacks.Callback):
    """Has the process told to go amid the number-th batch of validation."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def on_test_batch_end(self, batch, logs=None):
        self.number -= 1
        if self.number == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)


def with_averages():
    return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)


@pytest.mark.parametrize("swap_on_epoch", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_validation_of_moving_averages_may_be_told_to_go(trainer, tmp_path, swap_on_epoch):
    def train(*callbacks, folder=tmp_path, **how):
        saved = backup(folder, 1000, **how)
        swaps = keras.callbacks.SwapEMAWeights(swap_on_epoch)
        how = {"validation": (X[:24], Y[:24]), "state": False, "optimizer": with_averages}
        return life(trainer, saved, callbacks=[swaps, *callbacks], **how)

    expected, _ = train(folder=tmp_path / "other")
    with pytest.raises(SystemExit) as left:
        train(Told(2), **PREEMPTED)
    assert left.value.code == 75
    results, steps = train()
    assert len(steps) == STEPS, "it went on with the second validation"
    assert differences(results, expected) == []


class OwnLogs(keras.Model):
    """Logs that bear other names than the metrics from which they are computed."""

    def __init__(self, **how):
        super().__init__(**how)
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.total.update_state(loss)
        return {"loss": self.total.result(), "root": keras.ops.sqrt(self.total.result())}

    def test_step(self, data):
        return {"mean": keras.ops.mean(self(data[0]))}


def test_logs_that_a_step_computes_from_metrics_are_the_epochs(trainer, tmp_path):
    def make():
        with trainer.scope():
            inputs = keras.Input((6,))
            model = OwnLogs(inputs=inputs, outputs=keras.layers.Dense(1)(inputs))
            model.compile(keras.optimizers.SGD(0.1))
        return model

    def train(*callbacks, folder=tmp_path, **how):
        model = reuse("own logs", make)
        saved = backup(folder, 1000, **how)
        # One replica has an example more than the other.
        given = {"batch_size": 11, "epochs": 2, "shuffle": False, "validation_data": (X[:22], Y[:22])}
        return model.fit(X[:33], Y[:33] / 2.0, verbose=0, callbacks=[*callbacks, saved], **given).history

    expected = train(folder=tmp_path / "other")
    assert np.allclose(np.square(expected["root"]), expected["loss"]), "of both replicas, not the mean of theirs"
    with pytest.raises(SystemExit):
        train(Told(3), **PREEMPTED)  # amid the second validation
    assert train() == expected


@pytest.mark.slow
def test_training_goes_on_at_the_begin_of_an_epoch(trainer, tmp_path):
    _, last = check_equal(trainer, tmp_path, [Interrupt(step=STEPS + 2)], save_freq="epoch", given="dataset")
    assert last[0] == (1, 0)


@pytest.mark.slow
def test_it_may_be_interrupted_again_and_again(trainer, tmp_path):
    check_equal(trainer, tmp_path, [Interrupt(step=4), Interrupt(step=1), Interrupt(step=4), Interrupt(step=7)])


FED_BACK = {
    "compression": PerVariable({"kernel": ErrorFeedback(TopK(0.1))}),
    "optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "state": False,
}
OPTIONS = {
    "compression": FED_BACK,
    "compression_accumulated": {
        "compression": PerVariable({"kernel": ErrorFeedback(PowerSGD(1, min_compression_rate=0.1))}),
        "optimizer": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    },
    "executions": {"steps_per_execution": 2, "given": "arrays"},
    "executions_that_do_not_divide": {"steps_per_execution": 3},
    "accumulation": {
        "optimizer": lambda: keras.optimizers.Adam(
            0.01, gradient_accumulation_steps=3, use_ema=True, ema_overwrite_frequency=2
        )
    },
    "loss_scale": {
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=2.0**10, dynamic_growth_steps=4
        )
    },
    "schedule": {
        "optimizer": lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.8))
    },
    "metrics_with_state": {"metrics": lambda: [keras.metrics.SparseTopKCategoricalAccuracy(2)]},
}


@pytest.mark.parametrize("case", tiers.cases(OPTIONS, quick=["compression"], slow=SLOW))
def test_so_it_does_with(trainer, tmp_path, case):
    how = OPTIONS[case]
    if case == "schedule":  # whose rate no callback may set
        how = {**how, "callbacks": ()}
        expected = _without_rates(trainer, None, **how)
        assert _without_rates(trainer, backup(tmp_path), Interrupt(step=8), **how) is None
        assert differences(_without_rates(trainer, backup(tmp_path), **how), expected) == []
    else:
        check_equal(trainer, tmp_path, [Interrupt(step=5)], epochs=2, **how)


def _without_rates(trainer, saved, interrupt=None, **how):
    model = build(trainer, optimizer=how["optimizer"])
    try:
        callbacks = [interrupt or Interrupt(), *([saved] if saved else [])]
        history = trainer.fit(model, **DATA["function"](), epochs=4, verbose=0, callbacks=callbacks)
    except Interrupted:
        return None
    return {
        "history": history.history,
        "variables": [v.numpy() for v in (*model.variables, *model.optimizer.variables)],
    }


@pytest.mark.full
def test_each_replica_gets_its_own_errors_back(trainer, tmp_path, monkeypatch):
    expected, _ = life(trainer, None, **FED_BACK)
    life(trainer, backup(tmp_path), Interrupt(step=8), **FED_BACK)
    read_part = Storage.read_part

    def swapped(self, step, part):
        found = read_part(self, step, part)
        residuals = [name for name in found if "/residual" in name]
        assert len(residuals) in (0, 4)
        return found | {name: found[f"replica-{1 - int(name[8])}{name[9:]}"] for name in residuals}

    monkeypatch.setattr(Storage, "read_part", swapped)
    assert differences(life(trainer, backup(tmp_path), **FED_BACK)[0], expected) != []


@pytest.mark.full
def test_a_training_that_has_been_stopped_stays_so(trainer, tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            raise Interrupted

    stops = [keras.callbacks.EarlyStopping("loss", min_delta=1e9, patience=1)]
    expected, all_steps = life(trainer, None, callbacks=stops)
    assert len(all_steps) == 2 * STEPS
    assert life(trainer, backup(tmp_path), callbacks=[*stops, Fails()])[0] is None
    results, steps = life(trainer, backup(tmp_path), callbacks=stops)
    assert steps == [], "nothing was left to do"
    assert differences(results, expected) == []


@pytest.mark.full
def test_a_second_fit_has_backups_of_its_own(trainer, tmp_path):
    for attempt in range(3):
        trainer = tfdist.Trainer(trainer.strategy, backup_dir=tmp_path / "backup")
        model = build(trainer)
        first = Interrupt()
        trainer.fit(model, **DATA["function"](), epochs=2, verbose=0, callbacks=[first])
        assert len(first.batches) == (2 * STEPS, 0, 0)[attempt], "it is over"
        if attempt == 1:
            shutil.rmtree(tmp_path / "backup" / "fit-2")
        second = Interrupt(step=STEPS + 1 if attempt < 2 else None)
        with contextlib.suppress(Interrupted):
            history = trainer.fit(model, **DATA["function"](), epochs=3, verbose=0, callbacks=[second])
        assert second.batches[0] == ((0, 0), (0, 0), (1, 0))[attempt]
    assert len(history.history["loss"]) == 3
    assert model.optimizer.iterations.numpy() == 5 * STEPS
    trainer.save(model, tmp_path / "model.keras")
    assert not (tmp_path / "backup").exists()


def test_a_fit_that_was_interrupted_may_be_called_again_in_the_same_program(trainer, tmp_path):
    saved = backup(tmp_path)
    model = build(trainer)
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    for interrupt in (Interrupt(step=STEPS + 2), Interrupt()):
        with contextlib.suppress(Interrupted):
            trainer.fit(model, **DATA["function"](), epochs=2, verbose=0, callbacks=[decay, interrupt, saved])
    assert interrupt.batches[0] == (1, 1)
    assert model.optimizer.iterations.numpy() == 2 * STEPS


def test_backups_stay_until_the_model_is_written(trainer, tmp_path):
    saved = backup(tmp_path)
    model = fit_line(trainer, saved)
    assert (tmp_path / "backup" / f"step-{2 * STEPS}-end" / "manifest.json").exists()
    with pytest.raises(FileExistsError):
        (tmp_path / "model.keras").touch()
        trainer.save(model, tmp_path / "model.keras", overwrite=False)
    assert (tmp_path / "backup" / f"step-{2 * STEPS}-end").exists(), "the model was not written"
    trainer.save(model, tmp_path / "model.keras", delete_backup=False)
    assert (tmp_path / "backup").exists()
    trainer.save(model, tmp_path / "model.keras")
    assert not (tmp_path / "backup").exists()

    kept = backup(tmp_path, delete_checkpoint=False)
    trainer.fit(model, **DATA["function"](), epochs=1, verbose=0, callbacks=[kept])
    trainer.delete_backup()
    assert (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    ("epochs", "says"),
    [
        (2, "To train further, raise epochs. Received: 2."),
        (3, "A higher number of epochs changes nothing, because a callback or stop_training has ended it."),
    ],
)
def test_a_finished_training_that_is_started_again_is_told_so_once(trainer, tmp_path, capsys, epochs, says):
    def stop(epoch, logs):
        trained.model.stop_training = epochs == 3 and epoch == 1

    trained = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    fit_line(trainer, backup(tmp_path), trained, epochs=epochs)
    assert "fit trains nothing" not in capsys.readouterr().out
    again = backup(tmp_path)
    model = fit_line(trainer, again, trained, epochs=epochs)
    out = capsys.readouterr().out
    where = f"the training in backup_dir {str(tmp_path / 'backup')!r} finished at epoch 2 (step {2 * STEPS}). {says} "
    assert out.count(f"tfdist: fit trains nothing: {where}To train again from the beginning, remove its backups") == 1
    assert "resuming from step" not in out and "trainer.delete_backup()" in out

    trainer.fit(
        model, **DATA["function"](), epochs=1, verbose=0, callbacks=[again]
    )  # a second fit, which is not reached again
    fit_line(trainer, backup(tmp_path), trained, epochs=epochs)
    out = capsys.readouterr().out
    assert "fit trains nothing" not in out and f"resuming from step {2 * STEPS} (the end of epoch 2)" in out
    trainer.delete_backup()


WAYS = {
    "save": (lambda model, path: model.save(path / "model.keras"), False),
    "export": (lambda model, path: model.export(path / "exported", verbose=False), False),
    "trainer.export": (lambda model, path: model.distribute_strategy.trainer.export(model, path / "exported"), False),
    "delete_backup": (lambda model, path: model.save(path / "model.keras", delete_backup=False), True),
    "weights": (lambda model, path: model.save_weights(path / "model.weights.h5"), True),
    "another model": (lambda model, path: build(model.distribute_strategy.trainer).save(path / "model.keras"), True),
    "delete_checkpoint": (lambda model, path: model.save(path / "model.keras"), True),
    "fails": (lambda model, path: model.save(path), True),
}


@pytest.mark.parametrize("way", WAYS)
def test_saving_a_model_after_its_fit_removes_the_backups_of_that_fit(trainer, tmp_path, way):
    save, stays = WAYS[way]
    model = fit_line(trainer, backup(tmp_path, delete_checkpoint=way != "delete_checkpoint"))
    with contextlib.suppress(ValueError):
        save(model, tmp_path)
    assert (tmp_path / "backup").exists() == stays
    trainer.delete_backup()


class Saves(keras.callbacks.Callback):
    """A user's callback that saves."""

    def __init__(self, trainer, folder):
        super().__init__()
        self.trainer, self.folder = trainer, folder

    def on_epoch_end(self, epoch, logs=None):
        self.model.save(self.folder / "own.keras")
        self.model.export(self.folder / "own", verbose=False)
        self.trainer.save(self.model, self.folder / "trainers.keras")

    def on_train_end(self, logs=None):
        self.model.save(self.folder / "end.keras")


def test_what_a_callback_saves_removes_no_backup(trainer, tmp_path):
    saved = backup(tmp_path)
    model = fit_line(trainer, saved)
    callbacks = [keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"), Saves(trainer, tmp_path), saved]
    trainer.fit(model, **DATA["function"](), epochs=1, verbose=0, callbacks=callbacks)
    assert {"model.keras", "own.keras", "own", "trainers.keras", "end.keras"} < {
        path.name for path in tmp_path.iterdir()
    }
    for fit, step in ((tmp_path / "backup", 2 * STEPS), (tmp_path / "backup" / "fit-2", STEPS)):
        assert (fit / f"step-{step}-end" / "manifest.json").exists()
    model.save(tmp_path / "model.keras")
    assert not (tmp_path / "backup").exists(), "those of both fits"


def test_time_is_a_reason_to_save(trainer, tmp_path):
    saved = backup(tmp_path, 10**6, save_every_seconds=1e-6, keep=100)
    fit_line(trainer, saved, epochs=1)
    assert len(list((tmp_path / "backup").glob("step-*"))) == STEPS + 1, "each step's, and the epoch's"


@pytest.mark.full
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the interrupted one leaves its file open
def test_a_log_in_a_file_goes_on_where_the_backup_was(trainer, tmp_path):
    log = tmp_path / "log.csv"
    life(trainer, backup(tmp_path, "epoch"), Interrupt(step=2 * STEPS + 1), callbacks=[keras.callbacks.CSVLogger(log)])
    log.write_text(log.read_text() + "2" + log.read_text().splitlines()[-1][1:] + "\n")  # beyond the backup
    results, _ = life(trainer, backup(tmp_path, "epoch"), callbacks=[keras.callbacks.CSVLogger(log)])
    lines = log.read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2"]
    assert (
        float(lines[3].split(",")[2]) == results["history"]["loss"][2] or str(results["history"]["loss"][2]) in lines[3]
    )


@pytest.mark.full
def test_what_is_skipped_is_not_loaded_again(trainer, tmp_path):
    loaded = []

    def load(x, y):
        def note(indices):
            loaded.append(int(indices[0]))
            return indices

        return tf.ensure_shape(tf.gather(X, tf.numpy_function(note, [x], tf.int64)), [BATCH // 2, 6]), y

    def function(context):
        numbers = (np.arange(EXAMPLES), Y)
        return data.epochs(numbers, context, BATCH, 5, load=lambda batch: load(*batch))

    def run(interrupt):
        model = build(trainer)
        try:
            trainer.fit(
                model, function, steps_per_epoch=STEPS, epochs=20, verbose=0, callbacks=[interrupt, backup(tmp_path)]
            )
        except Interrupted:
            pass

    run(Interrupt(step=90))
    loaded.clear()
    run(Interrupt(step=2))
    assert len(loaded) < 60, "not the 180 batches that were skipped"


def test_the_only_backup_is_not_written_over(trainer, tmp_path, monkeypatch):
    write_part = Storage.write_part

    def watched(self, point, *arguments):
        assert not pathlib.Path(self.path(point), "manifest.json").exists()
        write_part(self, point, *arguments)

    monkeypatch.setattr(Storage, "write_part", watched)
    # The last step's and the epoch's are of the same step.
    fit_line(trainer, backup(tmp_path, STEPS, keep=1))
    assert [path.name for path in (tmp_path / "backup").glob("step-*")] == [f"step-{2 * STEPS}-end"]


def test_each_fit_finds_its_own_backups_though_others_are_deleted(trainer, tmp_path):
    for attempt in range(2):
        callback.saved_fits.clear()  # as in another process
        trainer = tfdist.Trainer(trainer.strategy, backup_dir=tmp_path / "backup")
        model = fit_line(trainer)
        trainer.save(model, tmp_path / "first.keras")
        assert model.optimizer.iterations.numpy() == 2 * STEPS
        second = Interrupt(step=None if attempt else STEPS + 1)
        with contextlib.suppress(Interrupted):
            trainer.fit(model, **DATA["function"](), epochs=2, verbose=0, callbacks=[second])
    assert second.batches[0] == (1, 0)
    assert model.optimizer.iterations.numpy() == 4 * STEPS


def test_trainings_one_after_the_other_in_one_folder_do_not_resume_from_each_other(trainer, tmp_path):
    for attempt in range(2):
        callback.saved_fits.clear()  # as in another process
        first, second = Interrupt(), Interrupt(step=None if attempt else STEPS + 1)
        trainer.save(fit_line(trainer, backup(tmp_path, "epoch"), first), tmp_path / "model.keras")
        with contextlib.suppress(Interrupted):
            model = fit_line(trainer, backup(tmp_path, "epoch"), second)
        assert first.batches[0] == (0, 0) and second.batches[0] == ((1, 0) if attempt else (0, 0))
    trainer.save(model, tmp_path / "model.keras")
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    ("start", "resumes"),
    [("process 1 on a (1), begun at 1.0", True), ("process 2 on a (2), begun at 1.0", False), ("", False)],
)
def test_only_a_restart_of_the_same_run_resumes_a_training_whose_model_is_saved(
    trainer, tmp_path, monkeypatch, start, resumes
):
    folder = tmp_path / "backup"
    fit_line(trainer, backup(tmp_path))
    monkeypatch.setenv(claim.JOB, "process 1 on a (1), begun at 1.0")
    assert not finished_training.finish(str(folder)), "the launcher may restart the tasks"
    monkeypatch.setenv(claim.JOB, start) if start else monkeypatch.delenv(claim.JOB)
    assert backup(tmp_path).resumes() == resumes
    again = Interrupt(step=1)
    with contextlib.suppress(Interrupted):
        fit_line(trainer, backup(tmp_path), again)
    assert again.batches == ([] if resumes else [(0, 0)])
    assert [*folder.glob("step-*")] if resumes else not [*folder.glob("step-*")]
    assert not (folder / "finished").exists(), "the training is not saved in this life"


class Second(keras.callbacks.Callback):
    """Amid this run, another one begins in its folder."""

    def __init__(self, folder, monkeypatch):
        super().__init__()
        self.folder, self.monkeypatch, self.steps = folder, monkeypatch, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == STEPS - 1:
            elsewhere = "process 1 on elsewhere (1), begun at 1.0"
            self.monkeypatch.setattr(claim, "this_run", lambda: elsewhere)
            Claim(str(self.folder), "backup_dir").take()
            self.monkeypatch.undo()


def test_of_two_runs_with_one_folder_the_first_ends_and_spoils_nothing(trainer, tmp_path, undisturbed, monkeypatch):
    folder = tmp_path / "backup"
    with pytest.raises(ConfigError, match="was taken over by a newer run: process 1 on elsewhere"):
        life(trainer, backup(tmp_path, 3), callbacks=[Second(folder, monkeypatch)])
    assert [path.name for path in folder.glob("step-*")] == ["step-3"]
    assert differences(life(trainer, backup(tmp_path, 3))[0], undisturbed) == []
    assert not (folder / claim.FILE).exists()


@pytest.mark.full
def test_a_run_without_a_seed_gets_one_and_the_next_run_the_same(trainer, tmp_path):
    orders = []
    for attempt in range(2):
        eager_context.context()._seed = None  # as in a process that has set none
        keras.backend.clear_session()
        trainer = tfdist.Trainer(trainer.strategy, backup_dir=tmp_path / "backup")
        order = tf.data.Dataset.range(32).shuffle(32).batch(4)  # made before `fit` knows of a backup
        orders.append(np.concatenate(list(order.as_numpy_iterator())).tolist())
        with trainer.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        with contextlib.suppress(Interrupted):
            pairs = order.map(lambda n: (tf.cast(n, tf.float32)[:, None], tf.cast(n, tf.float32)[:, None]))
            callbacks = [Interrupt(step=None if attempt else 8 + 5)]
            trainer.fit(model, pairs, epochs=2, verbose=0, callbacks=callbacks)
    assert orders[0] == orders[1] != sorted(orders[0])


def test_another_seed_than_that_of_the_backup_is_said(trainer, tmp_path, capsys):
    for step in (4, 1):
        with pytest.raises(Interrupted):
            fit_line(trainer, Interrupt(step), backup(tmp_path), seed=1001)
    assert "the random seed" not in capsys.readouterr().out
    fit_line(trainer, backup(tmp_path), seed=1002)
    assert "the random seed was not the backup's and has been set to the backup's" in capsys.readouterr().out


@pytest.mark.full
def test_what_callbacks_forget_is_said(trainer, tmp_path, capsys):
    class Forgets(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.count = 0

    life(trainer, backup(tmp_path), Interrupt(step=4), callbacks=[Forgets()])
    life(trainer, backup(tmp_path), callbacks=[Forgets()])
    assert ".Forgets" in capsys.readouterr().out


def test_logs_and_arguments_may_be_what_keras_takes(trainer, tmp_path):
    class Rate(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.01

    def make():
        with trainer.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
            model.compile(keras.optimizers.SGD(Rate()), "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
        return model

    arrays = {"x": X, "y": keras.utils.to_categorical(Y), "batch_size": BATCH}

    def train(interrupt):
        model = reuse("arguments", make)
        weights = dict(zip(np.unique(Y), [1.0, 2.0, 0.5], strict=True))
        callbacks = [interrupt, backup(tmp_path, STEPS)]
        return trainer.fit(model, **arrays, class_weight=weights, epochs=2, verbose=0, callbacks=callbacks).history

    with pytest.raises(Interrupted):
        train(Interrupt(step=STEPS + 1))
    history = train(Interrupt())
    assert np.shape(history["f1_score"]) == (2, 3)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_training_that_begins_later_counts_from_there(trainer, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("epoch,accuracy,learning_rate,loss\n0,1,1,1\n1,1,1,1\n")
    for interrupt in (Interrupt(step=STEPS + 1), Interrupt()):
        model = build(trainer)
        callbacks = [interrupt, keras.callbacks.CSVLogger(log, append=True), backup(tmp_path)]
        with contextlib.suppress(Interrupted):
            trainer.fit(model, **DATA["function"](), initial_epoch=2, epochs=5, verbose=0, callbacks=callbacks)
    assert interrupt.batches[0] == (2, 3), "the third step is the last one backed up"
    assert [line.split(",")[0] for line in log.read_text().splitlines()] == ["epoch", "0", "1", "2", "3", "4"]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_freq": 0}, "save_freq must be 'epoch' or a number of steps, 1 or more. Received: 0"),
        ({"save_freq": "batch"}, "Received: 'batch'"),
        ({"save_freq": True}, "Received: True"),
        ({"save_every_seconds": 0}, "save_every_seconds must be a number of seconds, more than 0"),
        ({"keep": 0}, "keep must be 1 or more"),
        ({"grace_seconds": 0}, "grace_seconds must be a number of seconds, more than 0"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        tfdist.BackupAndRestore(tmp_path, **arguments)


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "backup").touch()
    with pytest.raises(ConfigError, match=r"backup_dir must be a folder, and .* is a file"):
        tfdist.Trainer("mirrored", devices=2, backup_dir=tmp_path / "backup")


def test_without_a_trainer_it_is_refused(trainer, tmp_path, monkeypatch):
    model = build(trainer)
    monkeypatch.setattr(trainer.strategy, "trainer", None)
    with pytest.raises(ConfigError, match=r"call tfdist.Trainer\(...\).fit instead of model.fit"):
        model.fit(X, Y, verbose=0, callbacks=[backup(tmp_path)])


CONFIG = {"augment": {"flip": True}, "noise": 1.0}
OTHERS = {
    "model": ({"units": 9}, "model.layers.1.config.units is 9, and was 8"),
    "optimizer": ({"optimizer": lambda: keras.optimizers.SGD(0.01)}, "optimizer.0.class is 'SGD', and was 'Adam'"),
    "argument": ({"optimizer": lambda: keras.optimizers.Adam(0.02)}, "optimizer.0.learning_rate is 0.0199"),
    "executions": ({"steps_per_execution": 2}, "steps_per_execution is 2, and was 1"),
    "steps": ({"given": "endless"}, "fit.steps_per_epoch is 4, and was 5"),
    "data": ({"given": "arrays"}, "fit.data.x is '(80, 6)', and was not there"),
}


@pytest.fixture(scope="module")
def interrupted(mirrored, tmp_path_factory):
    """The backup of a training that was interrupted."""
    folder = tmp_path_factory.mktemp("interrupted")
    life(tfdist.Trainer(mirrored), backup(folder, config=CONFIG), Interrupt(step=4))
    return folder / "backup"


@pytest.mark.parametrize("other", OTHERS)
def test_a_backup_of_another_training_is_refused_by_name(trainer, tmp_path, interrupted, other):
    how, message = OTHERS[other]
    shutil.copytree(interrupted, tmp_path / "backup")
    with pytest.raises(ConfigError, match="is of another training") as e:
        life(trainer, backup(tmp_path, config=CONFIG), **how)
    assert message in str(e.value)
    assert "To train from the beginning, remove" in str(e.value)
    assert (tmp_path / "backup" / "step-3" / "manifest.json").exists()


def test_another_config_is_refused_by_name(trainer, tmp_path, interrupted):
    shutil.copytree(interrupted, tmp_path / "backup")
    with pytest.raises(ConfigError, match=r"augment\.flip is False, and was True"):
        life(trainer, backup(tmp_path, config={"augment": {"flip": False}, "noise": 1.0}))


# Disks


@pytest.fixture
def disk(tmp_path):
    """A disk of 1 MB, and its path."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no right to mount a disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


class Fill(keras.callbacks.Callback):
    """Fills the disk, or makes it read-only, when there is a backup on it."""

    def __init__(self, disk, how):
        super().__init__()
        self.disk, self.how, self.steps = disk, how, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 4:
            until(lambda: (self.disk / "backup" / "checkpoint").exists())
            until(lambda: not list(self.disk.rglob("*.partial")))
            self.how(self.disk)


def fill(disk):
    with contextlib.suppress(OSError), (disk / "junk").open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()


def protect(disk):
    # Not `remount,ro`: the run's lock is a file that is open for writing.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk / "backup"], check=True)


@pytest.mark.parametrize("how", tiers.cases([fill, protect], quick=[fill]))
def test_a_backup_that_cannot_be_written_ends_the_training_and_leaves_the_one_before(trainer, disk, undisturbed, how):
    with pytest.raises(BackupError, match=r"The backup .*step-6.* could not be written: .*Earlier backups remain"):
        life(trainer, backup(disk), callbacks=[Fill(disk, how)], epochs=10)
    if how is protect:
        with pytest.raises(ConfigError, match=r"backup_dir .* cannot be written to: .*ead-only file system"):
            life(trainer, backup(disk))
        subprocess.run(["umount", disk / "backup"], check=True)
    else:
        (disk / "junk").unlink()
    results, steps = life(trainer, backup(disk))
    assert steps[0] == (0, 3)
    assert differences(results, undisturbed) == []


@pytest.mark.full
def test_memory_stays_as_it_is(trainer, tmp_path):
    class Memory(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.pages = []

        def on_epoch_end(self, epoch, logs=None):
            self.pages.append(int(pathlib.Path("/proc/self/statm").read_text().split()[1]))

    memory = Memory()
    model = build(trainer)
    trainer.fit(
        model,
        lambda c: data.epochs((X, Y), c, BATCH, 5),
        steps_per_epoch=1,
        epochs=200,
        verbose=0,
        callbacks=[memory, backup(tmp_path, "epoch")],
    )
    assert memory.pages[-1] < 1.05 * memory.pages[19]


def test_a_folder_of_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match=r"backup_dir 'foo://x' has the unknown scheme 'foo'. Known are s3://"):
        tfdist.BackupAndRestore("foo://x")


class Captures(Counter):
    """Counts how often its state is taken."""

    captures = 0

    def state_dict(self):
        self.captures += 1
        return super().state_dict()


@pytest.mark.parametrize("freq", [STEPS, pytest.param(1000, marks=pytest.mark.full)])
def test_a_validation_after_a_backup_needs_no_second_copy(trainer, tmp_path, freq):
    """The state is taken before a validation only if none of that step is saved already."""
    captures = Captures()
    fit_line(trainer, captures, backup(tmp_path, freq, **PREEMPTED), validation_data=(X[:24], Y[:24]))
    # Once to check it, after the last step of each epoch, and at the end of all.
    assert captures.captures == 1 + 2 + 1


@pytest.mark.full
def test_sigterm_in_a_validation_after_a_backup_needs_no_second_one(trainer, tmp_path):
    how = {"validation": (X[:24], Y[:24])}
    expected, _ = life(trainer, None, **how)
    with pytest.raises(SystemExit) as left:
        life(trainer, backup(tmp_path, STEPS, **PREEMPTED), callbacks=[Told(2)], **how)
    assert left.value.code == 75
    assert (tmp_path / "backup" / f"step-{2 * STEPS}" / "manifest.json").exists()
    results, steps = life(trainer, backup(tmp_path, STEPS), **how)
    assert len(steps) == STEPS and differences(results, expected) == []
