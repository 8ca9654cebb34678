"""Training data that Python code makes: their random numbers, and the order of a `keras.utils.PyDataset`."""

from __future__ import annotations

import contextlib
import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.keras_loops import PyDatasetAdapter
from tfdist.runtime.log import log

_ARRAY = "array of "
_REMEDY = "give it state_dict() and load_state_dict(state), as a callback has"


class PythonDataState:
    """What Python code that makes data draws from: the global generators of `random` and `numpy.random`, and a PyDataset.

    Args:
        adapter: Keras' data adapter.
        calls_python: Whether the data call Python even if they are not a `keras.utils.PyDataset`.
        notes_order: Whether to look at the first batch of each epoch, which a backup needs.

    Attributes:
        is_used: Whether Python code makes the data.
        order: A checksum of a PyDataset's first batch in the present epoch, if its hooks may change it, else None.
    """

    def __init__(self, adapter: Any, calls_python: bool, records_order: bool):
        self._data: Any = adapter.py_dataset if isinstance(adapter, PyDatasetAdapter) else None
        self._records_order = records_order
        self._keeps = hasattr(self._data, "state_dict")
        self.is_used = self._data is not None or calls_python
        self.order: int | None = None

    def state(self) -> Any:
        """Returns the state, as plain JSON, or None if no Python code makes the data."""
        if not self.is_used:
            return None
        state = _global_generator_states()
        if self._keeps:
            state["data"] = json.loads(json.dumps(self._data.state_dict(), default=_plain))
        return state

    def restore(self, state: Any) -> None:
        """Restores what `state` returned."""
        if state:
            _set_global_generator_states(state)
            if self._keeps:
                self._data.load_state_dict(json.loads(json.dumps(state["data"]), object_hook=_decode_states))

    def doubts(self) -> Iterator[str]:
        """Yields why a resume will not be exact, and the remedies. Has a PyDataset make its first batch twice."""
        if self._data is None or self._keeps:
            return
        with _preserve_global_generators():
            drawn = _global_generator_states()
            first = _checksum(self._data)
            _set_global_generator_states(drawn)
            second = _checksum(self._data)
        if first != second:
            yield f"the PyDataset {type(self._data).__name__} draws from a generator of its own for each batch; {_REMEDY}"

    def record_order(self) -> None:
        """Notes the order of the epoch that begins next. No other thread may read the data meanwhile."""
        if self._records_order and self._data is not None and not self._keeps and _has_hooks(self._data):
            with _preserve_global_generators():
                self.order = _checksum(self._data)

    def end_epochs(self, number: int, order: int | None) -> None:
        """Calls a PyDataset's hooks as in the epochs that have ended, which may have shuffled it each time.

        Args:
            number: The epochs.
            order: `order` afterwards, if known.
        """
        if self._data is None or self._keeps:
            return
        for _ in range(number):
            self._data.on_epoch_begin()
            self._data.on_epoch_end()
        self.record_order()
        if order is not None and order != self.order:
            log(
                f"resume is not exact: the PyDataset {type(self._data).__name__} comes in another order than before; seed the "
                f"generator that its on_epoch_end draws from, or {_REMEDY}."
            )


def _has_hooks(data: keras.utils.PyDataset) -> bool:
    names = ("on_epoch_begin", "on_epoch_end")
    return any(getattr(type(data), name) is not getattr(keras.utils.PyDataset, name) for name in names)


def _checksum(data: keras.utils.PyDataset) -> int:
    checksum = 0
    for value in tf.nest.flatten(data[0]):
        array = np.ascontiguousarray(value)
        # Of objects, bytes would be addresses.
        checksum = zlib.crc32(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes(), checksum)
    return checksum


def _global_generator_states() -> dict[str, Any]:
    """Returns the state of the global generators."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {"random": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}


def _set_global_generator_states(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))


@contextlib.contextmanager
def _preserve_global_generators() -> Iterator[None]:
    """Leaves the global generators as they are."""
    state = _global_generator_states()
    try:
        yield
    finally:
        _set_global_generator_states(state)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return {_ARRAY + value.dtype.str: value.tolist()}
    raise TypeError(f"state_dict() must return plain values and arrays. Received: {type(value).__name__}.")


def _decode_states(values: dict[str, Any]) -> Any:
    if len(values) == 1 and (name := next(iter(values))).startswith(_ARRAY):
        return np.asarray(values[name], name.removeprefix(_ARRAY))
    return values
