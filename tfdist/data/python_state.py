"""The state of training data that Python code creates: random generators, and the order of a `keras.utils.PyDataset`."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import DataAdapter, Function, Json, Structure
from tfdist.compat.keras_loops import PyDatasetAdapter
from tfdist.data import python_generators
from tfdist.data.python_generators import PROCESS_GENERATORS, find_generators, get_states, set_states
from tfdist.runtime.log import logger

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
        drawn_by_hooks: For each hook call, the state from which the hook drew of each generator, else None.
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
        self._generators = list(dict.fromkeys([*PROCESS_GENERATORS, *find_generators(*roots)]))
        self.is_used = self._data is not None or bool(called)
        self.order: int | None = None
        self.drawn_by_hooks: list[list[Json]] = []
        self._hooks = 0  # number of hook calls
        self._after_hook: list[Json] = [None] * len(self._generators)

    def state(self) -> Json:
        """Returns the state as plain JSON, or None if no Python code creates the data."""
        if not self.is_used:
            return None
        data = self._data.state_dict() if self._keeps else None
        return {"generators": get_states(self._generators), "data": python_generators.to_json(data)}

    def restore(self, state: Json) -> None:
        """Restores the state that `state` returned."""
        if state:
            set_states(self._generators, state["generators"])
            if self._keeps:
                self._data.load_state_dict(python_generators.from_json(state["data"]))

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
        before = self.state()
        first = _checksum(self._data, 2)
        draws = self.state() != before
        self.restore(before)
        if draws and (self._data.workers > 1 or self._data.use_multiprocessing):
            yield (
                f"the workers of the PyDataset {name} draw from a generator in any order; give it workers=1, "
                "use_multiprocessing=False"
            )
        second = _checksum(self._data, 2)
        self.restore(before)
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
            set_states(self._generators, self._after_hook)
            set_states(self._generators, self.drawn_by_hooks[number])
        before = get_states(self._generators)
        hook()
        now = get_states(self._generators)
        # Store only states from which this hook draws and which differ from those after the last hook: usually few.
        if is_new:
            changes = zip(before, self._after_hook, now, strict=True)
            self.drawn_by_hooks.append([None if was in (last, new) else was for was, last, new in changes])
        self._after_hook = now

    def record_order(self) -> None:
        """Records the order of the next epoch in `order`. No other thread may read the data during the call."""
        if self._records:
            before = get_states(self._generators)
            for generator in self._generators:  # random augmentation must not change the checksum
                python_generators.reset(generator)
            self.order = _checksum(self._data, 1)
            set_states(self._generators, before)

    def end_epochs(self, number: int, order: int | None, drawn_by_hooks: list[list[Json]]) -> None:
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
        own = self._generators[len(PROCESS_GENERATORS) :]
        before = get_states(own)
        try:
            yield
        finally:
            set_states(own, before)


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
