"""`Trainer.save`: the chief writes the model's file, and the other ranks wait for it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ClusterError, ConfigError
from tfdist.strategies import model_methods
from tfdist.training.loop_context import LoopContext


def save(context: LoopContext, model: keras.Model, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Saves `model` as one `.keras` file. A collective.

    Args:
        context: The context of the trainer's loops.
        model: The model.
        path: A path that ends in `.keras`.
        **kwargs: As for `model.save`.

    Raises:
        ConfigError: `path` does not end in `.keras`.
        ClusterError: On the other ranks, if the chief could not write.
    """
    path = os.fspath(path)
    if not path.endswith(".keras"):
        raise ConfigError(f"path must end in '.keras'. Received: {path!r}.")
    context.strategy.statistics.desynchronize()  # a loop of the user's own may have trained
    context.strategy.statistics.synchronize()
    error: Exception | None = None
    if context.is_chief:
        try:
            _write(context, model, path, **kwargs)
        except Exception as e:
            error = e
    failed = context.ranks.gather(float(error is not None))[0, 0]
    if error is not None:
        raise error
    if failed:
        raise ClusterError(f"The chief could not write {path!r}; its own message says why.")


def _write(context: LoopContext, model: keras.Model, path: str, overwrite: bool = True, **kwargs: Any) -> None:
    """Writes the file under another name and then renames it: a reader never finds half a file."""
    explained = context.coordinator.scheduler.explain_errors() if context.coordinator else contextlib.nullcontext()
    partial = path.removesuffix(".keras") + ".partial.keras"
    if not overwrite and tf.io.gfile.exists(path):
        raise FileExistsError(f"path {path!r} exists, and overwrite=False was given.")
    tf.io.gfile.makedirs(os.path.dirname(path) or ".")
    with explained, context.working():
        model_methods.outside_of_scopes(model_methods.keras_own("save"), model, partial, **kwargs)
    tf.io.gfile.rename(partial, path, overwrite=True)
