"""What a callback says of itself: that it only observes, and where it writes.

A class says it by `only_observes = True` and `writes = "filepath"`. Keras' own classes do not, so it is said for them here.
"""

from __future__ import annotations

import keras

# They look at each step's logs and clock, and touch neither the model nor its training.
_KERAS_OBSERVERS = (keras.callbacks.TensorBoard, keras.callbacks.ProgbarLogger)
_KERAS_WRITERS = {
    keras.callbacks.ModelCheckpoint: "filepath",
    keras.callbacks.CSVLogger: "filename",
    keras.callbacks.TensorBoard: "log_dir",
    keras.callbacks.RemoteMonitor: "root",
}


def only_observes(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback changes nothing that ranks must agree on."""
    return type(callback) in _KERAS_OBSERVERS or getattr(callback, "only_observes", False)


def only_writes(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback is of a class that says where it writes, or of a subclass that overrides none of its hooks."""
    kind, _ = _writer(callback)
    if kind is None:
        return False
    hooks = [name for name in dir(kind) if name.startswith("on_") or name == "set_model"]
    return all(name not in vars(callback) and getattr(type(callback), name) is getattr(kind, name) for name in hooks)


def place_attribute(callback: keras.callbacks.Callback) -> str | None:
    """Returns the name of the attribute that says where a callback writes, or None if it says nothing of that."""
    return _writer(callback)[1]


def _writer(callback: keras.callbacks.Callback) -> tuple[type | None, str | None]:
    """Returns the first of a callback's classes that says where it writes, and the name of that attribute."""
    kinds = type(callback).__mro__
    for kind, said in ((kinds[0], vars(callback)), *((kind, vars(kind)) for kind in kinds)):
        name = said.get("writes", _KERAS_WRITERS.get(kind))
        if isinstance(name, str):
            return kind, name
    return None, None
