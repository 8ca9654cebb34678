"""Callbacks whose work is files, which the chief alone writes; those that do more than that run on all workers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

import keras

# Each with the attribute that says where it writes.
_PLACES = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.RemoteMonitor: "root",
}
_NO_SERVER = "no address (of the workers, the chief alone sends)"


def is_file_writer(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback is one of Keras' writers, or a subclass that overrides none of its hooks."""
    kind = _kind(callback)
    if kind is None:
        return False
    hooks = [name for name in dir(kind) if name.startswith("on_") or name == "set_model"]
    return all(name not in vars(callback) and getattr(type(callback), name) is getattr(kind, name) for name in hooks)


@contextlib.contextmanager
def redirect_to_temporary_files(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Lets writers write to a temporary folder, which is removed in the end; then they have their own places again.

    For the workers: a subclass that predicts in a hook must do so on all of them, but their files would be the chief's.

    Args:
        callbacks: Of which those that are no writers are left as they are.
    """
    places = [(each, _PLACES[kind]) for each in callbacks if (kind := _kind(each))]
    if not places:
        yield
        return
    before = [getattr(callback, name) for callback, name in places]
    with tempfile.TemporaryDirectory(prefix="tfdist-", ignore_cleanup_errors=True) as folder:
        for number, (callback, name) in enumerate(places):
            own = os.path.join(folder, str(number))
            os.mkdir(own)
            file = os.path.basename(getattr(callback, name))
            place = {"log_dir": own, "root": _NO_SERVER}.get(name, os.path.join(own, file))
            setattr(callback, name, place)
        try:
            yield
        finally:
            for (callback, name), place in zip(places, before, strict=True):
                setattr(callback, name, place)


def _kind(callback: keras.callbacks.Callback) -> type[keras.callbacks.Callback] | None:
    return next((kind for kind in _PLACES if isinstance(callback, kind)), None)
