"""Records what `fit`, `evaluate` and `predict` do, so that two loops can be compared line by line."""

from __future__ import annotations

import contextlib
import io
import math
import random
import re
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.small_models import dense

HOOKS = [
    f"on_{phase}{part}_{moment}"
    for phase, part in (
        *(("train", part) for part in ("", "_batch")),
        ("epoch", ""),
        *((phase, part) for phase in ("test", "predict") for part in ("", "_batch")),
    )
    for moment in ("begin", "end")
]
TOLERANCE = 1e-6
BEFORE_NUMBERS = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14)
_NUMBER = r"-?\d+\.\d+(?:e[+-]\d+)?"


class Recorder(keras.callbacks.Callback):
    """Records each hook with its arguments.

    Args:
        lines: Where to record them.
        mark: What each line begins with.
    """

    def __init__(self, lines: list[tuple[str, Any]], mark: str = ""):
        super().__init__()
        self._lines, self._mark = lines, mark

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._lines.append((f"{self._mark}set_model", model.name))

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self._lines.append((f"{self._mark}set_params", sorted(params.items())))

    def _record(self, hook: str, *args: Any, logs: Any = None) -> None:
        stops = [
            name for name in ("training", "evaluating", "predicting") if getattr(self.model, f"stop_{name}", False)
        ]
        if hook in ("on_train_begin", "on_test_begin", "on_predict_begin"):
            self._lines.append((f"{self._mark}params", sorted((self.params or {}).items())))
        self._lines.append((" ".join([self._mark + hook, *map(repr, args)]), [described(logs), stops]))


def _hook(name: str) -> Callable[..., None]:
    if "_batch_" in name:
        return lambda self, batch, logs=None: self._record(name, batch, logs=logs)
    if "epoch" in name:
        return lambda self, epoch, logs=None: self._record(name, epoch, logs=logs)
    return lambda self, logs=None: self._record(name, logs=logs)


for _name in HOOKS:
    setattr(Recorder, _name, _hook(_name))


class At(keras.callbacks.Callback):
    """Acts in a hook.

    Args:
        hook: The hook's name.
        act: Receives the model.
        call: The number of the hook's call in which to act, from 1 on; 0 means in each.
    """

    def __init__(self, hook: str, act: Callable[[keras.Model], Any], call: int = 1):
        super().__init__()
        self._act, self._call, self._calls = act, call, 0
        setattr(self, hook, self._act_in_hook)

    def _act_in_hook(self, *_: Any, **__: Any) -> None:
        self._calls += 1
        if self._call in (0, self._calls):
            self._act(self.model)


class Loop:
    """Calls a model's methods and records what they do.

    Args:
        trainer: The trainer whose methods are called; None calls Keras' own, of models built without a strategy.

    Attributes:
        lines: The record: (title, value) of each event.
    """

    def __init__(self, trainer: Any = None):
        self.lines: list[tuple[str, Any]] = []
        self._trainer = trainer
        self._models: list[keras.Model] = []

    def build(self, make: Callable[[], keras.Model], **compiled: Any) -> keras.Model:
        """Returns a compiled model; `optimizer` is a function that makes one, and `compiles=False` leaves `compile` out."""
        keras.backend.clear_session()  # so that names are equal
        keras.utils.set_random_seed(7)
        with self._trainer.scope() if self._trainer else contextlib.nullcontext():
            model = make()
            if compiled.pop("compiles", True):
                self.compile(model, **compiled)
        self._models.append(model)
        return model

    def compile(self, model: keras.Model, optimizer: Any = lambda: keras.optimizers.SGD(0.1), **compiled: Any) -> None:
        with self._trainer.scope() if self._trainer else contextlib.nullcontext():
            model.compile(optimizer=optimizer(), **{"loss": "mse", "metrics": ["mae"], **compiled})

    def recorder(self, mark: str = "") -> Recorder:
        return Recorder(self.lines, mark)

    def call(self, name: str, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """Calls a model's method and records its result, error, warnings and output; returns the result."""
        self.note(name, None)
        result = None
        with _printed() as printed, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                if self._trainer and hasattr(self._trainer, name):
                    result = getattr(self._trainer, name)(model, *args, **kwargs)
                else:
                    result = getattr(model, name)(*args, **kwargs)
            except Exception as e:
                # TensorFlow's errors hold a traceback.
                text = re.findall(r"^\w+Error: .*", str(e), re.M) if isinstance(e, tf.errors.OpError) else str(e)
                self.note("raised", [type(e).__name__, text])
            else:
                history = isinstance(result, keras.callbacks.History)
                self.note("returned", [result.epoch, described(result.history)] if history else described(result))
        for each in {str(each.message): each for each in warned}.values():  # a second trace repeats them
            if str(each.message).startswith("`shuffle=True` was passed") and "shuffle" not in kwargs:
                continue  # Keras warns of its own default, too
            self.note("warned", [each.category.__name__, str(each.message)])
        for line in _lines_of(printed.getvalue()):
            self.note("printed", line)
        return result

    def _record(self, name: str, model: keras.Model, args: Any, kwargs: Any) -> Any:
        kwargs = {"verbose": 0, **kwargs}
        callbacks = kwargs.get("callbacks", [])
        if isinstance(callbacks, list):
            kwargs["callbacks"] = [self.recorder(), *callbacks]
        return self.call(name, model, *args, **kwargs)

    def fit(self, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """Calls `fit`, silently unless told otherwise, and records its hooks unless `callbacks` is no list."""
        return self._record("fit", model, args, kwargs)

    def evaluate(self, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """As `fit`."""
        return self._record("evaluate", model, args, kwargs)

    def predict(self, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        """As `fit`."""
        return self._record("predict", model, args, kwargs)

    def note(self, title: str, value: Any) -> None:
        """Records a value."""
        self.lines.append((title, value))

    def note_models(self) -> None:
        """Records weights and optimizers of the models that were built, whether they are to stop, and the next random numbers."""
        for model in self._models:
            self.note("weights", described(model.get_weights()))
            optimizer = getattr(model, "optimizer", None)
            if optimizer is not None:
                self.note(
                    "optimizer", [(v.name, v.numpy()) for v in optimizer.variables if v.name != "seed_generator_state"]
                )
            self.note("stop_training", getattr(model, "stop_training", None))
        self.note(
            "draws",
            [random.random(), np.random.random(), float(tf.random.uniform([])), float(keras.random.uniform([]))],
        )


def fit(x, y=None, make=dense, compiled=None, **arguments):
    """Returns a program that fits a model once; `x` may be a function that makes the data."""

    def program(loop):
        model = loop.build(make, **(compiled or {}))
        given = {
            name: value() if name in ("callbacks", "validation_data") and callable(value) else value
            for name, value in arguments.items()
        }
        loop.fit(model, x() if callable(x) else x, y, **{"epochs": 2, **given})

    return program


def inputs(make_data, *steps, make=dense, **compiled):
    """Returns a program that evaluates and predicts data, whole and cut after some steps."""

    def program(loop):
        model = loop.build(make, **compiled)
        for number in (None, *steps):
            loop.evaluate(model, make_data(), steps=number, return_dict=True)
            loop.predict(model, make_data(), steps=number)

    return program


def calls(*made, **compiled):
    """Returns a program that calls methods, (name, arguments, named arguments), each of a model of its own."""

    def program(loop):
        for name, args, kwargs in made:
            model = loop.build(dense, **compiled)
            args = [value() if callable(value) else value for value in args]
            getattr(loop, name)(model, *args, **kwargs) if name != "predict" else loop.call(
                name, model, *args, **kwargs
            )

    return program


def described(value: Any) -> Any:
    """Returns logs or outputs as nested lists: of a dict its keys in order, of a number its type, too."""
    if isinstance(value, dict):
        return [(key, described(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(described, value)]
    if isinstance(value, tf.RaggedTensor):
        return ["RaggedTensor", value.to_list()]
    if isinstance(value, (np.ndarray, tf.Tensor)):
        return [type(value).__name__, str(value.dtype), np.asarray(value)]
    if isinstance(value, (int, float, np.number)):
        return [type(value).__name__, value]
    return value


def differences(expected: Loop, actual: Loop) -> list[str]:
    """Returns, for each call, its first difference, with the lines before it."""
    found = []
    calls = [_calls(loop.lines) for loop in (expected, actual)]
    if len(calls[0]) != len(calls[1]):
        found.append(f"{len(calls[1])} calls in place of {len(calls[0])}")
    for number, (wanted, got) in enumerate(zip(*calls, strict=False)):
        for place in range(max(len(wanted), len(got))):
            pair = [lines[place] if place < len(lines) else ("nothing", None) for lines in (wanted, got)]
            if not _equal(*pair):
                before = "".join(f"\n    {title}" for title, _ in wanted[max(0, place - 3) : place])
                found.append(f"call {number}:{before}\n  Keras:  {pair[0]}\n  tfdist: {pair[1]}")
                break
    return found


def _calls(lines: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    found: list[list[tuple[str, Any]]] = [[]]
    for line in lines:
        if line[0] in ("fit", "evaluate", "predict", "weights"):
            found.append([])
        found[-1].append(line)
    return found


def _equal(one: Any, other: Any) -> bool:
    if BEFORE_NUMBERS:
        one = _as_number(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and (one.dtype.kind not in "fc" or np.allclose(one, other, TOLERANCE, TOLERANCE, equal_nan=True))
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if (
        isinstance(one, str) and isinstance(other, str) and one != other
    ):  # the last of four digits may be rounded otherwise
        numbers = [list(map(float, re.findall(_NUMBER, text))) for text in (one, other)]
        texts = [re.sub(_NUMBER, "", text) for text in (one, other)]
        return texts[0] == texts[1] and np.allclose(*numbers, rtol=2e-3, atol=1.01e-4)
    return type(one) is type(other) and bool(one == other)


def _as_number(keras_own: Any, actual: Any) -> Any:
    """Returns a scalar of Keras' own as a number where a number is expected: before Keras 3.14 some methods return arrays and tensors."""
    if isinstance(actual, float) and isinstance(keras_own, np.ndarray) and keras_own.shape == ():
        return float(keras_own)
    listed = isinstance(actual, list) and actual[:1] == ["float"] and isinstance(keras_own, list)
    if listed and keras_own[0] in ("ndarray", "EagerTensor") and keras_own[2].shape == ():
        return ["float", float(keras_own[2])]
    return keras_own


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def _printed() -> Iterator[_Terminal]:
    """Returns what the block prints to a terminal; progress bars show each step, also those within 50 ms of the one before."""
    show = keras.utils.Progbar.update

    def update(bar: Any, *args: Any, **kwargs: Any) -> None:
        bar.interval = -1
        show(bar, *args, **kwargs)

    with (
        unittest.mock.patch.object(keras.utils.Progbar, "update", update),
        contextlib.redirect_stdout(_Terminal()) as out,
    ):
        yield out


def _lines_of(printed: str) -> list[str]:
    """Returns printed lines without colors and times, and without the trainer's own first line."""
    printed = re.sub(r"\x1b\[\d+m|\x08", "", printed)
    printed = re.sub(r"\b\d+[um]?s/(step|epoch)", r"T/\1", printed)
    printed = re.sub(r"\b(\d+:)?\d+:\d+(?= T/)|\b\d+s(?= T/| - T/)", "T", printed)
    lines = [line.rstrip() for line in re.split(r"[\r\n]", printed)]
    return [line for line in lines if line and not line.startswith("one_device: 1 replica")]
