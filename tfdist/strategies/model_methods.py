"""A model's own `fit`, `evaluate`, `predict` and the like do what its trainer's do; its `save` is safe on every rank.

Between a model's creation and its training Keras gives a strategy no place at which it learns of the model. So `keras.Model` has
these methods of ours as soon as there is a strategy of ours. They look at the strategy of the model, and leave all models of
others to Keras. It is the one thing that tfdist changes outside of its own objects.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf

Method = Callable[..., Any]


class Trains(Protocol):
    """What a strategy's `trainer` does for the models of its scope."""

    is_at_work: bool

    def call(self, name: str, method: Method, model: keras.Model, args: Any, kwargs: Any) -> Any:
        """Does what `method`, Keras' method of that name, does for `model`, as the trainer's own does."""


_TRAINING = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_SAVING = ("save", "save_weights")


def install() -> None:
    """Gives `keras.Model` these methods; once is enough."""
    for names, made in ((_TRAINING, _trained), (_SAVING, _saved)):
        for name in names:
            method = getattr(keras.Model, name)
            if not hasattr(method, "keras_own"):
                setattr(keras.Model, name, made(name, method))


def keras_own(name: str) -> Method:
    """Returns Keras' own method."""
    method = getattr(keras.Model, name)
    return getattr(method, "keras_own", method)


def _trained(name: str, keras_own: Method) -> Method:
    @functools.wraps(keras_own)
    def method(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        trainer: Trains | None = getattr(model.distribute_strategy, "trainer", None)
        if trainer is None or trainer.is_at_work:
            return keras_own(model, *args, **kwargs)
        return trainer.call(name, keras_own, model, args, kwargs)

    return _keeping(method, keras_own)


def _saved(name: str, keras_own: Method) -> Method:
    @functools.wraps(keras_own)
    def method(model: keras.Model, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        save = functools.partial(outside_of_scopes, keras_own, model)
        if not hasattr(model.distribute_strategy, "statistics") or not isinstance(filepath, (str, os.PathLike)):
            return save(filepath, *args, **kwargs)
        path = os.fspath(filepath)
        overwrite = kwargs.get("overwrite", args[0] if args else True)
        one_file = path.endswith((".keras", ".h5")) and not (len(args) > 1 or kwargs.keys() - {"overwrite"})
        if not one_file or (not overwrite and tf.io.gfile.exists(path)):
            return save(filepath, *args, **kwargs)
        suffix = next(each for each in (".weights.h5", ".h5", ".keras") if path.endswith(each))
        partial = f"{path.removesuffix(suffix)}.{uuid.uuid4().hex[:8]}.partial{suffix}"
        try:
            save(partial)
            tf.io.gfile.rename(partial, path, overwrite=True)
        finally:
            with contextlib.suppress(tf.errors.OpError):
                tf.io.gfile.remove(partial)
        return None

    return _keeping(method, keras_own)


def _keeping(method: Method, keras_own: Method) -> Method:
    method.keras_own = keras_own  # type: ignore[attr-defined]
    return method


def outside_of_scopes(function: Method, *args: Any, **kwargs: Any) -> Any:
    """Returns what `function` returns, called where no strategy's scope is open.

    To save a model Keras creates a second optimizer. In the scope of several workers its variables would be sent to the
    others, of whom none may be saving.
    """
    if not tf.distribute.has_strategy():
        return function(*args, **kwargs)
    found: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            found.append(function(*args, **kwargs))
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=call, name="outside_of_scopes")  # a scope is its thread's
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]
