"""Looks at the functions that call tfdist, and swaps classes of objects, where Keras gives no other way.

Keras calls a strategy for several purposes by the same method, and does not say for which. So the strategy looks at its caller.
All of this can go once the Trainer runs Keras' loops itself.

Each function here adds a frame. "The caller" is the function that called the function that asks.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

# Names of Keras' functions.
KERAS_STEP = "one_step_on_data"
KERAS_PREDICT_STEP = "one_step_on_data_distributed"
KERAS_PREDICT_DATA = "get_data"
KERAS_APPLY = "_distributed_tf_update_step"
# The modules of Keras' own steps and compiled losses.
KERAS_STEP_MODULES = ("keras.src.backend.", "keras.src.trainers.")


def called_from_step() -> bool:
    """Whether the caller is the function with which Keras trains or evaluates on one batch."""
    return sys._getframe(2).f_code.co_name == KERAS_STEP


def called_from_predict_step() -> bool:
    """Whether the caller is the function with which Keras predicts one batch."""
    return sys._getframe(2).f_code.co_name == KERAS_PREDICT_STEP


def called_from_predict_data() -> bool:
    """Whether the caller is the function with which `predict` takes a batch from its iterator."""
    return sys._getframe(2).f_code.co_name == KERAS_PREDICT_DATA


def called_from_keras_step() -> bool:
    """Whether the caller is in one of the modules of Keras' own steps and compiled losses."""
    return bool(sys._getframe(2).f_globals["__name__"].startswith(KERAS_STEP_MODULES))


def applying_optimizer() -> Any:
    """Returns the optimizer whose function that updates variables is the caller; None for another caller."""
    caller = sys._getframe(2)
    return caller.f_locals["self"] if caller.f_code.co_name == KERAS_APPLY else None


def caller_local(name: str, depth: int = 1) -> Any:
    """Returns a local variable of a function that led to the function that asks, or None if it has none.

    Args:
        name: The variable.
        depth: 1 for the caller, 2 for the caller's caller.
    """
    return sys._getframe(depth + 1).f_locals.get(name)


def nearest_caller(names: Collection[str]) -> str | None:
    """Returns the name of the innermost running function that is one of `names`, or None."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back
    return frame and str(frame.f_code.co_name)


def swap_class(value: Any, new: type) -> None:
    """Makes an object one of another class, a subclass of its own."""
    value.__class__ = new


def frame_call(frame: Any) -> tuple[str, str, Any]:
    """Returns the module and the name of the function that a frame runs, and its `self`, or None."""
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name, frame.f_locals.get("self")
