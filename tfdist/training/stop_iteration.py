"""StopIteration of a user's callback, which Keras' loops would take for the end of the data: an epoch would be cut short, in silence."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from tfdist.compat.keras_internals import BATCH_HOOKS
from tfdist.errors import stop_iteration_error


@contextlib.contextmanager
def raised_as_error(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Has the batch hooks of callbacks raise a RuntimeError in place of StopIteration, in the loop that is called inside.

    Args:
        callbacks: The callbacks, which are changed until then: a proxy in their place would hide their class.
    """
    changed = []
    try:
        for callback in callbacks:
            for name in BATCH_HOOKS:
                own = vars(callback).get(name)  # LambdaCallback has its hooks there
                if own is not None or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name):
                    changed.append((callback, name, own))
                    setattr(
                        callback, name, functools.partial(_call, getattr(callback, name), type(callback).__name__, name)
                    )
        yield
    finally:
        for callback, name, own in reversed(changed):
            if own is None:
                delattr(callback, name)
            else:
                setattr(callback, name, own)


def _call(hook: Callable[..., Any], kind: str, name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        return hook(*args, **kwargs)
    except StopIteration as e:
        raise stop_iteration_error(f"{kind}.{name}", e) from e
