"""Inspection of the call stack, where Keras offers no other way to learn the purpose of a call.

Each function here adds a frame. "The caller" is the caller of the function that calls a function of this module.
"""

from __future__ import annotations

import sys
import traceback
import types
from typing import Any

import keras

from tfdist.runtime.report.stacks import Frame

# Names of Keras' functions.
KERAS_APPLY = "_distributed_tf_update_step"
# The function that creates a Keras variable's tf.Variable, whose module moved in Keras 3.16.
KERAS_CREATE = (keras.Variable._initialize.__module__, "_initialize")
# The modules between the call of a layer and its method `call`.
_CALLS = (keras.Layer.__module__, keras.Operation.__module__, keras.Layer.__call__.__globals__["__name__"])
# The modules of variables, and the packages of optimizers and of Keras' own steps and compiled losses.
_VARIABLES = (KERAS_CREATE[0], keras.Variable.assign.__module__)
_OPTIMIZERS = keras.optimizers.SGD.__module__.rpartition(".")[0]
_STEPS = tuple(method.__module__.rpartition(".")[0] for method in (keras.Model.train_step, keras.Model.compute_loss))


def called_from_keras_step() -> bool:
    """Returns whether the caller is in one of the modules of Keras' own steps and compiled losses."""
    return bool(sys._getframe(2).f_globals["__name__"].startswith(_STEPS))


def is_called_by_keras_step(model: keras.Model) -> bool:
    """Returns whether the caller is the `call` of a model, and Keras' own `train_step` or `test_step` of the model calls it."""
    frame: Any = sys._getframe(2).f_back
    while frame is not None and _module(frame) in _CALLS:
        frame = frame.f_back
    codes = [step.__code__ for step in (keras.Model.train_step, keras.Model.test_step)]
    return frame is not None and frame.f_code in codes and frame.f_locals["self"] is model


def is_assigned_by_users() -> bool:
    """Returns whether code outside of Keras and tfdist assigns a variable. Call it in a method that the variable calls."""
    frame: Any = sys._getframe(2)
    while frame is not None and _module(frame).startswith(_VARIABLES):
        frame = frame.f_back
    return frame is not None and not _module(frame).startswith(("keras.", "tfdist."))


def is_reduced_by_users() -> bool:
    """Returns whether code outside of Keras and tfdist calls the function of TensorFlow that calls the caller's."""
    frame: Any = sys._getframe(1)
    while frame is not None and _module(frame).startswith(("tfdist.compat.", "tfdist.gradients.", "tensorflow.")):
        frame = frame.f_back
    return frame is not None and not _module(frame).startswith(("keras.", "tfdist."))


def is_creating_keras_weight() -> bool:
    """Returns whether a `keras.Variable` is being created, as by `add_weight`, and not by an optimizer."""
    frame = _creation_frame()
    if frame is None:
        return False
    while frame is not None and _module(frame).startswith("keras."):
        if _module(frame).startswith(_OPTIMIZERS):
            return False
        frame = frame.f_back
    return True


def users_place() -> str:
    """Returns the innermost line of the user's program around the caller, as `script.py:42`; empty if there is none."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        place = Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if place.is_users:
            return str(place).removesuffix(f" in {place.function}")
        frame = frame.f_back
    return ""


def without_packages(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback with only the frames of the user's program, such as a callback's, without tfdist's and installed packages'."""
    if traceback is None:
        return None
    inner = without_packages(traceback.tb_next)
    code = traceback.tb_frame.f_code
    if not Frame(code.co_filename, traceback.tb_lineno, code.co_name).is_users:
        return inner
    return types.TracebackType(inner, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


def applying_optimizer() -> keras.optimizers.Optimizer | None:
    """Returns the optimizer whose function that updates variables is the caller; None for other callers."""
    caller = sys._getframe(2)
    return caller.f_locals["self"] if caller.f_code.co_name == KERAS_APPLY else None


def raising_callback(error: BaseException) -> tuple[Any, str] | None:
    """Returns the callback whose method has raised an error, and the method's name; None if no callback raised it."""
    trace = error.__traceback__
    while trace:
        owner = trace.tb_frame.f_locals.get("self")
        if _is_single_callback(owner):
            return owner, trace.tb_frame.f_code.co_name
        trace = trace.tb_next
    return None


def _is_single_callback(owner: object) -> bool:
    """Returns whether an object is a callback; False for a `CallbackList`, which calls the callbacks."""
    return isinstance(owner, keras.callbacks.Callback) and not isinstance(owner, keras.callbacks.CallbackList)


def callback_calls(error: BaseException) -> list[str]:
    """Returns the methods of callbacks that an error came through, such as `EarlyStopping's on_epoch_end`, from the outside in."""
    around = [frame for frame, _ in traceback.walk_stack(None)][::-1]
    below = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = []
    for frame in [*around, *below]:
        owner = frame.f_locals.get("self")
        name = frame.f_code.co_name
        if _is_single_callback(owner) and name.startswith("on_"):
            is_trainers = type(owner).__module__.startswith("tfdist.training.")
            whose = "the trainer" if is_trainers else type(owner).__name__
            calls.append(f"{whose}'s {name}")
    return calls


def created_variable() -> keras.Variable | None:
    """Returns the `keras.Variable` that is being created, or None."""
    frame = _creation_frame()
    return frame and frame.f_locals.get("self")


def _creation_frame() -> Any:
    """Returns the frame of Keras' function that is creating a variable's tf.Variable, or None."""
    frame: Any = sys._getframe(1)
    while frame is not None and (_module(frame), frame.f_code.co_name) != KERAS_CREATE:
        frame = frame.f_back
    return frame
