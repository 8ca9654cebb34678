"""The state of training data that Python code creates: random generators, and the order of a `keras.utils.PyDataset`."""

from __future__ import annotations

import contextlib
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import DataAdapter, Function, Json, Structure
from tfdist.compat.keras_loops import PyDatasetAdapter
from tfdist.data import python_generators
from tfdist.data.python_generators import PROCESS_GENERATORS, find_generators
from tfdist.runtime.log import logger

_ARRAY = "array of "
_REMEDY = "give it state_dict() and load_state_dict(state), like a callback"


class PythonDataState:
    """The state of the random generators from which Python code or a PyDataset draws to create data.

    These are the generators of the process, `random` and `numpy.random`, and generators that the code holds.

    Args:
        adapter: Keras' data adapter.
        called: The Python functions that datasets call, if the data are not a `keras.utils.PyDataset`.
        is_backed_up: Whether to record the state for a backup at the hooks of a PyDataset.
        reads_on: Whether a thread may read the data while hooks are called.

    Attributes:
        is_used: Whether Python code creates the data.
        order: A checksum of a PyDataset's first batch in the current epoch, if hooks may change its order, else None.
        drawn_by_hooks: For each hook call, the state from which the hook drew, by the generator's index.
    """

    def __init__(self, adapter: DataAdapter, called: Sequence[Function], is_backed_up: bool, reads_on: bool):
        self._data: Any = adapter.py_dataset if isinstance(adapter, PyDatasetAdapter) else None
        self._keeps = hasattr(self._data, "state_dict")
        has_hooks = self._data is not None and _has_hooks(self._data)
        self._reads_on = reads_on and has_hooks
        # A thread that reads while a hook runs may draw between the states before and after the hook.
        self._records = is_backed_up and has_hooks and not self._keeps and not reads_on
        roots = called
        if self._keeps:
            roots = ()
        elif self._data is not None:
            roots = (self._data,)
        self._own = [generator for generator in find_generators(*roots) if generator not in PROCESS_GENERATORS]
        self._generators = [*PROCESS_GENERATORS, *self._own]
        self.is_used = self._data is not None or bool(called)
        self.order: int | None = None
        self.drawn_by_hooks: list[dict[str, Any]] = []
        self._hooks = 0  # number of hook calls
        self._after_hook: list[Json] = [None] * len(self._generators)

    def state(self) -> Json:
        """Returns the state as plain JSON, or None if no Python code creates the data."""
        if not self.is_used:
            return None
        state = process_generator_states()
        state["own"] = [_to_json(python_generators.get_state(generator)) for generator in self._own]
        if self._keeps:
            state["data"] = _to_json(self._data.state_dict())
        return state

    def restore(self, state: Json) -> None:
        """Restores the state that `state` returned."""
        if state:
            set_process_generator_states(state)
            # A backup of an earlier version has no "own".
            for generator, saved in zip(self._own, state.get("own", ()), strict=False):
                python_generators.set_state(generator, _from_json(saved))
            if self._keeps:
                self._data.load_state_dict(_from_json(state["data"]))

    def doubts(self, callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[str]:
        """Yields why a resume will not be exact, and the remedies. Reads the first batches of a PyDataset twice.

        The user's `callbacks` may draw while a thread reads the data.
        """
        for kind in dict.fromkeys(type(value) for value in callbacks if self.is_used):
            # Search only its class: a callback that holds the data may still not draw.
            if any(value in self._generators for value in find_generators(kind)):
                yield (
                    f"the callback {kind.__name__} may draw from a generator, such as random or numpy.random, while the data's Python "
                    "code draws from it in a thread; give it its own generator, with state_dict() and load_state_dict(state)"
                )
        if self._data is None:
            return
        name = type(self._data).__name__
        if self._reads_on:
            yield (
                f"a thread reads the PyDataset {name} ahead while its on_epoch_begin or on_epoch_end is called; leave out "
                "steps_per_epoch"
            )
        if self._data.workers > 1 or self._data.use_multiprocessing:
            before = self.state()
            _checksum(self._data, 2)
            draws = self.state() != before
            self.restore(before)
            if draws:
                yield (
                    f"the workers of the PyDataset {name} draw from a generator in any order; give it workers=1, "
                    "use_multiprocessing=False"
                )
        if self._keeps:
            return
        with self._preserve_generators():
            before = self._states()
            first = _checksum(self._data, 2)
            self._set_states(before)
            second = _checksum(self._data, 2)
        if first != second:
            yield f"the PyDataset {name} draws for each batch from a generator that cannot be found; {_REMEDY}"

    def run_hook(self, hook: Callable[[], None]) -> None:
        """Calls a hook of a PyDataset. If this call ran before the backup, the hook draws the same numbers again."""
        number = self._hooks
        self._hooks += 1
        if not self._records:
            hook()
            return
        is_new = number >= len(self.drawn_by_hooks)
        if not is_new:
            # First the states after the last hook, of which the stored ones hold only the differences.
            self._set_states(self._after_hook)
            drawn = self.drawn_by_hooks[number]
            self._set_states([drawn.get(str(index)) for index in range(len(self._generators))])
        before = self._states()
        hook()
        states = self._states()
        # Store only states from which this hook draws and which differ from those after the last hook: usually few.
        if is_new:
            changes = enumerate(zip(before, self._after_hook, states, strict=True))
            self.drawn_by_hooks.append(
                {str(index): was for index, (was, last, now) in changes if was not in (last, now)}
            )
        self._after_hook = states

    def record_order(self) -> None:
        """Records the order of the next epoch in `order`. No other thread may read the data during the call."""
        if self._records:
            with self._preserve_generators():
                for generator in self._generators:  # random augmentation must not change the checksum
                    python_generators.reset(generator)
                self.order = _checksum(self._data, 1)

    def end_epochs(self, number: int, order: int | None, drawn_by_hooks: list[dict[str, Any]]) -> None:
        """Calls a PyDataset's hooks as often as in the `number` of epochs that have ended, because they may shuffle the data.

        `order` is the expected value of the attribute after the calls, if known; `drawn_by_hooks` is the attribute from the backup.
        """
        if self._data is None or self._keeps:
            return
        self.drawn_by_hooks = drawn_by_hooks
        for _ in range(number):
            self.run_hook(self._data.on_epoch_begin)
            self.run_hook(self._data.on_epoch_end)
        self.record_order()
        if order is not None and order != self.order:
            logger.warning(
                f"resume is not exact: the PyDataset {type(self._data).__name__} yields its batches in another order than before; seed the "
                f"generator that its on_epoch_end draws from, or {_REMEDY}."
            )

    @contextlib.contextmanager
    def preserve_own_generators(self) -> Iterator[None]:
        """Restores the generators that the Python code holds at the end of the context."""
        before = [python_generators.get_state(g) for g in self._own]
        try:
            yield
        finally:
            for generator, state in zip(self._own, before, strict=True):
                python_generators.set_state(generator, state)

    @contextlib.contextmanager
    def _preserve_generators(self) -> Iterator[None]:
        before = self._states()
        try:
            yield
        finally:
            self._set_states(before)

    def _states(self) -> list[Json]:
        return [_to_json(python_generators.get_state(generator)) for generator in self._generators]

    def _set_states(self, states: Sequence[Json]) -> None:
        """Sets the states that are not None."""
        for generator, state in zip(self._generators, states, strict=True):
            if state is not None:
                python_generators.set_state(generator, _from_json(state))


def process_generator_states() -> dict[str, Any]:
    """Returns the states of `random` and `numpy.random`, as plain JSON."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {"random": random.getstate(), "numpy": [name, np.asarray(keys).tolist(), *rest]}


def set_process_generator_states(state: dict[str, Any]) -> None:
    """Sets the states that `process_generator_states` returned."""
    version, numbers, gauss = state["random"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))


def _has_hooks(data: keras.utils.PyDataset) -> bool:
    names = ("on_epoch_begin", "on_epoch_end")
    return any(getattr(type(data), name) is not getattr(keras.utils.PyDataset, name) for name in names)


def _checksum(data: keras.utils.PyDataset, batches: int) -> int:
    """Returns a checksum of the first batches."""
    total = 0
    for number in range(min(batches, data.num_batches or batches)):
        total = checksum(data[number], total)
    return total


def checksum(batch: Structure, before: int = 0) -> int:
    """Returns a checksum of the values of a batch, and of those whose checksum is `before`."""
    for value in tf.nest.flatten(batch):
        if hasattr(value, "toarray"):  # of SciPy
            value = value.toarray()
        array = np.ascontiguousarray(value)
        content = array.tobytes()
        if array.dtype.hasobject:  # the bytes of object arrays are addresses
            content = repr(array.tolist()).encode()
        before = zlib.crc32(content, before)
    return before


def _to_json(state: Json) -> Json:
    return json.loads(json.dumps(state, default=_plain))


def _from_json(state: Json) -> Json:
    return json.loads(json.dumps(state), object_hook=_decode_states)


def _plain(value: Any) -> Json:
    if isinstance(value, (np.ndarray, np.generic)):
        return {_ARRAY + value.dtype.str: value.tolist()}
    raise TypeError(f"state_dict() must return plain values and arrays. Received: {type(value).__name__}.")


def _decode_states(values: dict[str, Any]) -> Json:
    if len(values) == 1:
        ((name, value),) = values.items()
        if name.startswith(_ARRAY):
            return np.asarray(value, name.removeprefix(_ARRAY))
    return values
