"""`Trainer.save` and `Trainer.export`: the chief writes the model, and the other ranks wait for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import ClusterError, ConfigError, describe_error, format_value
from tfdist.runtime import storage
from tfdist.runtime.phase import phase
from tfdist.strategies import model_methods, saving
from tfdist.training.loop_context import LoopContext


def save(context: LoopContext, model: keras.Model, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Saves `model` as one `.keras` file. A collective: raises WriteError on a chief that could not write, and ClusterError on the other ranks."""
    path = _as_text(path)
    if not path.endswith(".keras"):
        raise ConfigError(f"path must end in '.keras'. Received: {path!r}.")
    with phase("call", "save"):
        _by_chief(context, path, lambda: _save(model, path, **kwargs))


def export(context: LoopContext, model: keras.Model, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Exports `model` to the folder `path` for inference. A collective; raises the same errors as `save`."""
    path = _as_text(path)

    def write() -> None:
        with saving.beside(path) as partial:
            saving.outside_of_scopes(model_methods.keras_own("export"), model, partial, **kwargs)

    _by_chief(context, path, write)


def _as_text(path: Any) -> str:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ConfigError(f"path must be a str or a pathlib.Path. Received: {format_value(path)}.")
    return text


def _by_chief(context: LoopContext, path: str, write: Callable[[], None]) -> None:
    context.strategy.statistics.desynchronize()  # a custom loop may have changed the statistics since the last synchronization
    context.strategy.statistics.synchronize()
    error: Exception | None = None
    if context.is_chief:
        try:
            _make_folder(path)
            with context.engine.explaining_errors(), context.working(), phase("saving"):
                write()
        except Exception as e:
            error = e
    reason = context.ranks.agree(describe_error(error) if error else "")
    if error:
        raise error
    if reason:
        raise ClusterError(f"The chief could not write {path!r}: {reason}")


def _make_folder(path: str) -> None:
    try:
        storage.make_folder(os.path.dirname(path) or ".")
    except OSError as e:
        raise saving.write_error(path, e) from e


def _save(model: keras.Model, path: str, overwrite: bool = True, **kwargs: Any) -> None:
    if not overwrite and storage.exists(path):
        raise FileExistsError(f"path {path!r} exists, and overwrite=False was given.")
    with saving.beside(path) as partial:
        saving.outside_of_scopes(model_methods.keras_own("save"), model, partial, **kwargs)
