"""`fit`, `evaluate` and `predict` on one device do what Keras' own loops do, hook by hook and line by line.

Each row is a program that runs twice: with a model of Keras alone, and with a model in the scope of a Trainer.
"""

from __future__ import annotations

import pathlib
import re
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers import small_models as models
from tests.helpers import tiers
from tests.helpers.recorded_loop import HOOKS, At, Loop, calls, differences, fit, inputs
from tests.helpers.reused_model import ReusedModel
from tests.helpers.small_models import CLASSES, WEIGHTS, Batches, X, Y, dataset, dense, generator

VALIDATION = {"validation_data": (X[:7], Y[:7]), "validation_batch_size": 3}


def executions(loop):
    model = loop.build(dense, steps_per_execution=3)
    loop.fit(model, X, Y, batch_size=4, epochs=2, validation_data=(X, Y))
    loop.fit(model, dataset(filter=True), epochs=2)
    loop.evaluate(model, X, Y, batch_size=7)
    loop.predict(model, X, batch_size=7)
    loop.fit(model, dataset(repeat=True), epochs=2, steps_per_epoch=6)


def executions_of_other_sizes(loop):
    model = loop.build(dense, steps_per_execution=3)
    loop.fit(model, dataset(), epochs=2)
    for size in (4, 20):
        loop.evaluate(model, X, Y, batch_size=size)
        loop.predict(model, X, batch_size=size)


def verbose(loop):
    model = loop.build(dense)
    for level in (1, 2):
        loop.fit(model, X, Y, batch_size=4, epochs=2, verbose=level, **VALIDATION)
        loop.evaluate(model, X, Y, batch_size=4, verbose=level)
        loop.predict(model, X, batch_size=4, verbose=level)
    loop.fit(model, dataset(filter=True), epochs=2, verbose=1, validation_data=dataset(filter=True))
    loop.fit(model, dataset(filter=True), epochs=2, verbose=2)
    loop.evaluate(model, dataset(filter=True), verbose=1)
    loop.predict(model, dataset(filter=True), verbose=1)
    loop.call("fit", model, X, Y, epochs=2, verbose="auto")  # no callback but Keras' own


def results(loop):
    model = loop.build(dense)
    for arguments in ({}, {"return_dict": True}, {"return_dict": True, "sample_weight": WEIGHTS}, {"steps": 2}):
        loop.evaluate(model, X, Y, batch_size=6, **arguments)
    loop.evaluate(loop.build(dense, metrics=None), X, Y)


def positional(loop):
    model = loop.build(dense)
    loop.call("fit", model, X, Y, 4, 3, 0, [loop.recorder()], 0.25)
    loop.call("evaluate", model, X, Y, 4, 0, WEIGHTS, 3, [loop.recorder()], True)
    loop.call("predict", model, X, 4, 0, 3, [loop.recorder()])


def stops(loop, hooks, call):
    """Stops the training in a call of each hook."""
    model = loop.build(dense)
    for hook in hooks:
        callbacks = [At(hook, lambda model: setattr(model, "stop_training", True), call)]
        loop.fit(model, X, Y, batch_size=8, epochs=2, callbacks=callbacks, **VALIDATION)


def stops_of_passes(loop):
    model = loop.build(dense)
    for phase, call in (("test", loop.evaluate), ("predict", loop.predict)):
        for hook in [hook for hook in HOOKS if phase in hook]:
            name = "stop_evaluating" if phase == "test" else "stop_predicting"
            call(model, dataset(), callbacks=[At(hook, lambda model, name=name: setattr(model, name, True))])
    for hook in [hook for hook in HOOKS if "test" in hook]:
        callbacks = [At(hook, lambda model: setattr(model, "stop_evaluating", True))]
        loop.fit(model, X, Y, batch_size=8, epochs=2, callbacks=callbacks, **VALIDATION)


def _raise(_):
    raise KeyError("of a hook")


def errors(loop):
    model = loop.build(dense)
    for hook in [hook for hook in HOOKS if "predict" not in hook]:
        loop.fit(model, X, Y, batch_size=8, epochs=2, callbacks=[At(hook, _raise)], **VALIDATION)
    loop.fit(model, X, Y, batch_size=8, **VALIDATION)
    for hook in [hook for hook in HOOKS if "test" in hook]:
        loop.evaluate(model, X, Y, callbacks=[At(hook, _raise)])
    for hook in [hook for hook in HOOKS if "predict" in hook]:
        loop.predict(model, X, callbacks=[At(hook, _raise)])
    loop.evaluate(model, X, Y)
    loop.predict(model, X)


def errors_of_data(loop):
    def broken():
        yield from generator(2)
        raise KeyError("of a generator")

    model = loop.build(dense)
    loop.fit(model, broken())
    loop.evaluate(model, broken())
    loop.predict(model, broken())
    loop.fit(model, X, Y)


def within(loop, hook, call=2):
    """Fits with a callback that uses the same model's other methods."""
    model = loop.build(dense)

    def act(model):
        loop.note(
            "inner", model.evaluate(X[:6], Y[:6], verbose=0, return_dict=True, callbacks=[loop.recorder("inner ")])
        )
        loop.note("inner", model.predict(X[:6], verbose=0, callbacks=[loop.recorder("inner ")]))
        loop.note("inner", model.train_on_batch(X[:4], Y[:4], return_dict=True))
        loop.note("inner", model.predict_on_batch(X[:4]))

    loop.fit(model, X, Y, batch_size=8, epochs=2, callbacks=[At(hook, act, call)], **VALIDATION)


def compiled_again(loop):
    model = loop.build(dense)
    loop.fit(model, X, Y, **VALIDATION)
    loop.compile(model, lambda: keras.optimizers.SGD(0.3), loss="mae", metrics=["mse"])
    loop.fit(model, X, Y, epochs=2, **VALIDATION)
    loop.evaluate(model, X, Y)


def epochs(loop):
    model = loop.build(dense)
    loop.fit(model, X, Y, epochs=2)
    loop.fit(model, X, Y, epochs=4, initial_epoch=2)
    loop.fit(model, X, Y, epochs=2, initial_epoch=2)
    loop.fit(model, X, Y, epochs=0)


def callback_list(loop):
    model = loop.build(dense)
    params = {"add_history": True, "verbose": 2, "epochs": 2, "steps": 3}
    for options in (params, {**params, "add_progbar": True}, {"add_history": True}, {}):
        callbacks = keras.callbacks.CallbackList([loop.recorder()], model=model, **options)
        loop.fit(model, X, Y, batch_size=8, epochs=2, verbose=2, callbacks=callbacks, **VALIDATION)
    loop.evaluate(model, X, Y, callbacks=keras.callbacks.CallbackList([loop.recorder()], model=model))
    loop.predict(model, X, callbacks=keras.callbacks.CallbackList([loop.recorder()], model=model))


def callbacks_alone(loop):
    model = loop.build(dense)
    loop.fit(model, X, Y, callbacks=loop.recorder())
    loop.fit(model, X, Y, callbacks=(loop.recorder(),))
    loop.fit(model, X, Y, callbacks=None)


def files(loop):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        model = loop.build(dense)
        callbacks = [
            keras.callbacks.ModelCheckpoint(path / "{epoch}-{val_mae:.2f}.weights.h5", save_weights_only=True),
            keras.callbacks.ModelCheckpoint(path / "best.keras", monitor="loss", save_best_only=True, verbose=1),
            keras.callbacks.ModelCheckpoint(path / "b{batch}.weights.h5", save_weights_only=True, save_freq=2),
            keras.callbacks.CSVLogger(path / "log.csv"),
        ]
        loop.fit(model, X, Y, batch_size=6, epochs=3, callbacks=callbacks, **VALIDATION)
        loop.lines[:] = [
            (title, value.replace(folder, "") if title == "printed" else value) for title, value in loop.lines
        ]
        loop.note("files", sorted(each.name for each in path.iterdir()))
        loop.note(
            "log",
            [
                float(value)
                for value in (path / "log.csv").read_text().split("\n", 1)[1].replace("\n", ",").split(",")[:-1]
            ],
        )


def averages(loop):
    for frequency in (None, 3):
        for callbacks in ([], [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]):
            model = loop.build(
                dense, optimizer=lambda f=frequency: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=f)
            )
            loop.fit(model, X, Y, batch_size=6, epochs=2, callbacks=callbacks, **VALIDATION)


def limits(loop):
    model = loop.build(dense)
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        loop.fit(model, X, Y, batch_size=4, epochs=3, **VALIDATION)
        loop.fit(model, dataset(), epochs=3, steps_per_epoch=4)
        loop.evaluate(model, X, Y, batch_size=4)
        loop.predict(model, X, batch_size=4)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)


def own_model(loop, make):
    model = loop.build(make)
    loop.fit(model, X, Y, epochs=2, validation_data=(X, Y))
    loop.evaluate(model, X, Y)
    loop.predict(model, X)
    loop.note("calls", getattr(model, "calls", None))


def outputs(loop):
    two = {"one": Y, "two": Y * 2}
    model = loop.build(
        models.named_outputs, loss={"one": "mse", "two": "mae"}, metrics=None, loss_weights={"one": 0.3, "two": 0.7}
    )
    loop.fit(model, X, two, epochs=2, validation_data=(X, two), sample_weight={"one": WEIGHTS, "two": WEIGHTS})
    loop.evaluate(model, X, two)
    loop.predict(model, X, batch_size=6)
    model = loop.build(models.listed_outputs, loss=["mse", None], metrics=[["mae"], None])
    loop.fit(model, X, [Y, np.hstack([Y, Y])], epochs=2)
    loop.evaluate(model, X, [Y, np.hstack([Y, Y])], return_dict=True)
    loop.predict(model, X, batch_size=6)


def mixed_precision(loop):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = loop.build(dense)
    finally:
        keras.config.set_dtype_policy("float32")
    loop.fit(model, X, Y, batch_size=6, epochs=2, **VALIDATION)
    loop.predict(model, X)


def several_inputs(loop):
    model = loop.build(models.listed_inputs)
    for data in ([X, X * 2], (X, X * 2)):
        loop.fit(model, data, Y, batch_size=6, validation_split=0.25)
        loop.predict(model, data)
    model = loop.build(models.named_inputs)
    loop.fit(model, {"a": X, "b": X * 2}, Y, batch_size=6, validation_data=({"a": X, "b": X}, Y))
    loop.evaluate(model, {"b": X, "a": X}, Y)
    loop.predict(model, {"a": X, "b": X * 2})


def shapes(loop):
    """Predicts batches of several widths, and a number for each batch."""
    widths = tf.data.Dataset.range(1, 5).map(lambda width: tf.ones([2, width]))
    loop.predict(loop.build(models.identity, compiles=False), widths)
    loop.predict(loop.build(models.Number), X, batch_size=6)


def masks(loop):
    x, y = np.tile(X[:, None], (1, 4, 1)), np.tile(Y[:, None], (1, 4, 2))
    x[::2, 2:] = 0
    model = loop.build(models.masked)
    loop.fit(model, x, y, batch_size=6, epochs=2, validation_data=(x, y))
    loop.evaluate(model, x, y, sample_weight=np.tile(WEIGHTS[:, None], (1, 4)))


def unbuilt_models(loop):
    loop.evaluate(loop.build(models.unbuilt), X, Y, batch_size=6)
    loop.predict(loop.build(models.unbuilt), X, batch_size=6)
    loop.predict(loop.build(models.unbuilt, compiles=False), dataset())
    loop.fit(loop.build(models.unbuilt), X, Y, batch_size=6, **VALIDATION)


def empty(loop):
    model = loop.build(dense)
    loop.fit(model, X[:0], Y[:0])
    loop.evaluate(model, X[:0], Y[:0])
    loop.predict(model, X[:0])
    loop.fit(model, dataset().take(0))
    loop.fit(model, X, Y, validation_data=dataset().take(0))


def running_out(loop):
    model = loop.build(dense)
    loop.fit(model, dataset(), epochs=4, steps_per_epoch=2)
    loop.fit(model, dataset(), epochs=2, steps_per_epoch=7)
    loop.fit(model, dataset(filter=True), epochs=4, steps_per_epoch=2)
    loop.fit(model, dataset(filter=True), epochs=3, steps_per_epoch=7)
    loop.fit(model, generator(5), epochs=4, steps_per_epoch=2)
    loop.fit(model, generator(3), epochs=3)
    loop.fit(model, X, Y, batch_size=4, epochs=2, steps_per_epoch=7)
    loop.evaluate(model, dataset(), steps=9)
    loop.predict(model, dataset(), steps=9)
    loop.fit(model, X, Y, validation_data=dataset(), validation_steps=9)


def fits(*validations):
    """Returns a program that fits with each of some arguments for the validation."""

    def program(loop):
        model = loop.build(dense)
        for arguments in validations:
            given = {name: value() if callable(value) else value for name, value in arguments.items()}
            loop.fit(model, X, Y, batch_size=8, epochs=3, **given)

    return program


ROWS = {
    "arrays": fit(X, Y, batch_size=4),
    "arrays with a rest": fit(X, Y, batch_size=6, epochs=3),
    "arrays in order": fit(X, Y, batch_size=6, shuffle=False),
    "a data set": fit(dataset),
    "a data set of unknown size": fit(lambda: dataset(filter=True)),
    "an endless data set": fit(lambda: dataset(repeat=True), steps_per_epoch=3, epochs=3),
    "a shuffled data set": fit(lambda: dataset(shuffle={}), epochs=3),
    "a data set shuffled by a seed": fit(lambda: dataset(shuffle={"seed": 3}), epochs=3),
    "a data set shuffled once": fit(lambda: dataset(shuffle={"reshuffle_each_iteration": False}), epochs=3),
    "a shuffled data set over several epochs": fit(
        lambda: dataset(shuffle={}, repeat=True), epochs=4, steps_per_epoch=3
    ),
    "a generator": fit(lambda: generator(50), steps_per_epoch=4, epochs=3),
    "a PyDataset": fit(Batches, epochs=3),
    "an endless PyDataset": fit(lambda: Batches(None), epochs=3, steps_per_epoch=3),
    "a PyDataset with workers": fit(lambda: Batches(12, workers=2, max_queue_size=3), epochs=3),
    "a PyDataset with workers in order": fit(lambda: Batches(12, workers=2), epochs=3, shuffle=False),
    "an endless PyDataset with workers": fit(lambda: Batches(None, workers=2), epochs=3, steps_per_epoch=3),
    "data that run out": running_out,
    "no data": empty,
    "no targets": fit(X, make=models.sums, compiled={"loss": None, "metrics": None}),
    "no metrics": fit(X, Y, compiled={"metrics": None}),
    "validations": fits(
        {"validation_data": lambda: dataset(repeat=True), "validation_steps": 3},
        {"validation_data": Batches},
        {"validation_split": 0.3, "validation_freq": [1, 3]},
    ),
    "other validations": fits(
        {"validation_data": dataset},
        {"validation_data": dataset, "validation_steps": 2},
        {"validation_data": lambda: dataset(filter=True)},
        {"validation_data": (X, Y, WEIGHTS)},
        {"validation_data": [X, Y]},
        {"validation_split": 0.3},
        {"validation_split": 0.3, "validation_freq": 2},
        {**VALIDATION, "validation_steps": 2},
    ),
    "class weights": fit(
        X,
        CLASSES,
        make=models.classifier,
        compiled={"loss": "sparse_categorical_crossentropy"},
        class_weight={0: 1, 1: 3},
    ),
    "sample weights": fit(X, Y, sample_weight=WEIGHTS, compiled={"weighted_metrics": ["mse"]}, validation_split=0.25),
    "steps per execution": executions,
    "executions of other sizes": executions_of_other_sizes,
    "verbose": verbose,
    "results of evaluate": results,
    "evaluate and predict of a data set": inputs(dataset, 2, 5),
    "evaluate and predict of unknown size": inputs(lambda: dataset(filter=True), 2),
    "evaluate and predict of a PyDataset": inputs(Batches, 2),
    "evaluate and predict of a PyDataset with workers": inputs(lambda: Batches(workers=2), 2),
    "evaluate and predict of a generator": inputs(generator, 2),
    "evaluate and predict in executions": inputs(dataset, 3, steps_per_execution=3),
    "evaluate and predict that end within an execution": inputs(dataset, 4, steps_per_execution=3),
    "fit that ends within an execution": fit(
        lambda: dataset(repeat=True), steps_per_epoch=4, compiled={"steps_per_execution": 3}
    ),
    "positional arguments": positional,
    "wrong arguments": calls(
        ("fit", [X, Y[:5]], {}),
        ("fit", [X, Y], {"validation_split": 1.5}),
        ("fit", [X, Y], {"class_weight": {0: 1.0}, "sample_weight": WEIGHTS}),
        ("fit", [X, Y], {"validation_data": X}),
        ("fit", [X, Y], {"epochs": "two"}),
        ("fit", [X, Y], {"batch_size": 0}),
        ("fit", [dataset, Y], {}),
        ("fit", [dataset], {"validation_split": 0.5}),
        ("fit", [dataset], {"batch_size": 4}),
        ("fit", [dataset], {"sample_weight": WEIGHTS}),
        ("fit", [dataset], {"shuffle": True}),
        ("fit", ["text", Y], {}),
        ("evaluate", [X, Y[:5]], {}),
        ("evaluate", [X, Y], {"epochs": 2}),
        ("evaluate", [dataset, Y], {}),
    ),
    "models that are not compiled": calls(("fit", [X, Y], {}), ("evaluate", [X, Y], {}), compiles=False),
    "unknown arguments": calls(("fit", [X, Y], {"epoch": 3}), ("predict", [X], {"batch": 3}), ("predict", [], {})),
    # An argument gives the row a model of its own: after the first call, a model that is shared shows no difference.
    "targets that are missing": calls(("fit", [X], {}), ("evaluate", [X], {}), compiles=True),
    "targets beside a generator": calls(("fit", [generator, Y], {}), ("fit", [generator], {"sample_weight": WEIGHTS})),
    "callbacks that are none": calls(("fit", [X, Y], {"callbacks": [3]})),
    "stops in batches": lambda loop: stops(loop, ("on_train_batch_end", "on_test_batch_begin"), 2),
    "stops in other batches": lambda loop: stops(loop, ("on_train_batch_begin", "on_test_batch_end"), 2),
    "stops in first batches": lambda loop: stops(
        loop, [hook for hook in HOOKS if re.search("t_batch|n_batch", hook)], 1
    ),
    "stops": lambda loop: stops(loop, [hook for hook in HOOKS if not re.search("batch|predict", hook)], 1),
    "stops of evaluate and predict": stops_of_passes,
    "errors of hooks": errors,
    "errors of data": errors_of_data,
    "calls within on_epoch_end": lambda loop: within(loop, "on_epoch_end", 0),
    "calls within on_train_batch_end": lambda loop: within(loop, "on_train_batch_end"),
    "calls within on_train_batch_begin": lambda loop: within(loop, "on_train_batch_begin"),
    "calls within on_train_begin": lambda loop: within(loop, "on_train_begin", 1),
    "compiled again": compiled_again,
    "epochs": epochs,
    "a CallbackList": callback_list,
    "callbacks in no list": callbacks_alone,
    "files": files,
    "moving averages of weights": averages,
    "EarlyStopping": fit(
        X,
        Y,
        epochs=9,
        callbacks=lambda: [keras.callbacks.EarlyStopping("val_loss", patience=1, verbose=1, restore_best_weights=True)],
        compiled={"optimizer": lambda: keras.optimizers.SGD(0.6)},
        **VALIDATION,
    ),
    "LearningRateScheduler": fit(
        X, Y, callbacks=lambda: [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2, verbose=1)]
    ),
    "LambdaCallback": fit(
        X,
        Y,
        callbacks=lambda: [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(added=epoch))],
    ),
    "limits of Keras' configuration": limits,
    "auto_scale_loss": fit(X, Y, compiled={"auto_scale_loss": False}),
    "run_eagerly": fit(X, Y, batch_size=8, compiled={"run_eagerly": True}, **VALIDATION),
    "run_eagerly in executions": fit(X, Y, batch_size=4, compiled={"run_eagerly": True, "steps_per_execution": 3}),
    "jit_compile": fit(X, Y, compiled={"jit_compile": True}),
    "mixed precision": mixed_precision,
    "Adam and batch normalization": fit(
        X, Y, make=models.normalized, batch_size=6, compiled={"optimizer": keras.optimizers.Adam}, **VALIDATION
    ),
    "tensors": fit(tf.constant(X), tf.constant(Y), batch_size=6, validation_split=0.25),
    "several inputs": several_inputs,
    "outputs of several shapes": shapes,
    "dropout": fit(X, Y, make=models.dropout, batch_size=6, **VALIDATION),
    "own steps": lambda loop: own_model(loop, models.OwnSteps),
    "own training function": lambda loop: own_model(loop, models.OwnFunction),
    "own methods": lambda loop: own_model(loop, models.OwnMethods),
    "several outputs": outputs,
    "masks": masks,
    "models that are not built": unbuilt_models,
}
QUICK = {
    "arrays with a rest",
    "an endless data set",
    "a shuffled data set",
    "a generator",
    "a PyDataset",
    "a PyDataset with workers",
    "data that run out",
    "no data",
    "validations",
    "sample weights",
    "steps per execution",
    "verbose",
    "evaluate and predict of a data set",
    "fit that ends within an execution",
    "unknown arguments",
    "stops",
    "stops in batches",
    "stops of evaluate and predict",
    "errors of hooks",
    "calls within on_epoch_end",
    "files",
    "EarlyStopping",
    "own steps",
    "dropout",
}
# Why a row differs, and what all of its differences have in common. Rows of EMPTY_STEP do not differ since Keras 3.16.
EMPTY_STEP = "by design: Keras counts a step that finds no data", r"\('iteration'|hold no batch"
EXACT = "by design: steps that end within an execution are honored", r"_batch_end 5|weights"
DIFFERENT = {
    "a data set of unknown size": EMPTY_STEP,
    "data that run out": EMPTY_STEP,
    "verbose": EMPTY_STEP,
    "errors of data": EMPTY_STEP,
    "no data": ("by design: data without a batch are an error", r"hold no batch|\('iteration'"),
    "fit that ends within an execution": EXACT,
    "evaluate and predict that end within an execution": EXACT,
    "targets that are missing": ("by design: an error of our own before the first hook", "The data have no labels"),
    "callbacks that are none": ("by design: an error of our own", "ConfigError"),
    "wrong arguments": ("by design: errors of our own, before anything is trained", "ConfigError|'weights'"),
    "a CallbackList": ("by design: another list calls its callbacks", "tfdist: \\('set_model'"),
}


class SharedLoop(Loop):
    """A loop whose programs share their usual model, which is traced once. Each finds it as it was at first."""

    def __init__(self, trainer=None):
        super().__init__(trainer)
        self._shared = None

    def build(self, make, **compiled):
        if make is not dense or compiled:
            return super().build(make, **compiled)
        if self._shared is None:
            self._shared = ReusedModel(super().build(dense))
        keras.utils.set_random_seed(7)
        model = self._shared.reset()
        self._models = [model]
        return model

    def compile(self, model, *args, **compiled):
        super().compile(model, *args, **compiled)
        self._shared = None  # compiling again replaces the optimizer, whose first values would be unknown

    def begin(self):
        """Forgets what the program before has recorded."""
        self.lines, self._models = [], []


@pytest.fixture(scope="module")
def loops():
    return SharedLoop(), SharedLoop(tfdist.Trainer("one_device"))


@pytest.mark.parametrize("row", tiers.cases(ROWS, quick=QUICK))
def test_a_loop_does_what_keras_does(row, loops):
    for loop in loops:
        loop.begin()
        ROWS[row](loop)
        loop.note_models()
    found = differences(*loops)
    if row in DIFFERENT:
        why, pattern = DIFFERENT[row]
        empty_step_alone = DIFFERENT[row] is EMPTY_STEP and keras.version() >= "3.16"
        assert found or empty_step_alone, f"no difference is left ({why}): remove the row from DIFFERENT"
        found = [each for each in found if not re.search(pattern, each)]
    assert not found, "\n".join(found)
