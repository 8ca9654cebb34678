"""The random state of training data, which a backup holds and resumed training restores.

A resumed training repeats the interrupted pass over the data, and skips the elements that were used. So a backup holds the
states at the beginning of that pass and of the first pass, which may have filled a cache.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import DataAdapter, Function, Json
from tfdist.compat import keras_loops, tf_internals
from tfdist.compat.keras_internals import SEED_STATE
from tfdist.compat.tf_internals import GENERATOR_STATE
from tfdist.data.graph import nodes, walk
from tfdist.data.python_generators import from_json, to_json
from tfdist.data.python_state import PythonDataState

_DATA = "data"


def random_states(dataset: tf.data.Dataset) -> Iterator[tf.Variable]:
    """Yields the states of Keras' seed generators and of `tf.random.Generator`s that a dataset's own functions use."""
    for function in tf_internals.dataset_functions(dataset):
        for variable in sorted(function.graph.variables, key=lambda v: v.name):
            name = variable.name.split("/")[-1].split(":")[0]
            if variable.dtype.is_integer and name.startswith((SEED_STATE, GENERATOR_STATE)):
                yield variable


def python_functions(dataset: tf.data.Dataset) -> Iterator[Function]:
    """Yields the Python functions that a dataset's own functions call, such as those of `from_generator` and `py_function`."""
    for function in tf_internals.dataset_functions(dataset):
        for node in nodes(function.graph):
            if tf_internals.is_python_call(node):
                yield tf_internals.python_function(node)


class DatasetRandomState:
    """The random state of the data of a training.

    Args:
        datasets: This process's datasets, in an order that is the same in the next run.
        adapter: Keras' data adapter, which calls its own `on_epoch_end` at the end of each epoch's data.
        is_backed_up: Whether `capture` will be called.
        reads_on: Whether a pass may continue after the end of an epoch, so that a thread may read ahead.

    Attributes:
        is_random: Whether the data have a state that this object can save.
        calls_python: Whether Python code creates the data.
        stays: Whether the training has resumed within an epoch and run no step since.
    """

    def __init__(self, datasets: Sequence[tf.data.Dataset], adapter: DataAdapter, is_backed_up: bool, reads_on: bool):
        all_nodes = [node for dataset in datasets for node in walk(dataset)]
        self._variables = list({id(v): v for node in all_nodes for v in random_states(node)}.values())
        called = [function for node in all_nodes for function in python_functions(node)]
        self._python = PythonDataState(adapter, called, is_backed_up, reads_on)
        self.calls_python = self._python.is_used
        self.is_random = bool(self._variables) or self.calls_python
        self.stays = self._epochs_before_resume = False
        self._has_begun = False
        self._epochs = 0  # number of epochs whose data have ended
        self._is_over = False  # whether the data of the current epoch have ended
        # By moment: the beginning of the "first" pass and of this "pass".
        self._states: dict[str, Json] = {}
        self._adapter = adapter
        # The hooks of a PyDataset may draw random numbers.
        begin = adapter.on_epoch_begin
        end = adapter.on_epoch_end
        adapter.on_epoch_begin = lambda: self._python.run_hook(begin)
        adapter.on_epoch_end = lambda: self._end_epoch(end)

    def doubts(self, callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[str]:
        """Yields why the saved state of the data is incomplete, and the remedies. The user's `callbacks` may draw while a thread reads the data."""
        return self._python.doubts(callbacks)

    def begin_epoch(self) -> None:
        """Records that an epoch begins."""
        self._has_begun = True
        self._is_over = False

    @contextlib.contextmanager
    def preserve_seed_generators(self) -> Iterator[None]:
        """Restores the seed generators, and the generators of the data's Python code, at the end of the context."""
        before = [variable.numpy() for variable in self._variables]
        try:
            with self._python.preserve_own_generators():
                yield
        finally:
            for variable, value in zip(self._variables, before, strict=True):
                variable.assign(value)

    def begin_pass(self, number: int) -> None:
        """Records the state at the beginning of a pass, before its iterator is created. Passes count from 1."""
        self._states["pass"] = self._now()
        if number == 1:
            self._states["first"] = self._states["pass"]
            self._python.record_order()

    def begin_items(self) -> None:
        """Records the state before the first item of a pass over Python data is made, after its order is drawn."""
        self._states["items"] = self._now()

    def items_draw(self) -> bool:
        """Returns whether the items of the pass may have drawn before the backup; else they need not be made again."""
        items = self._states.get("items")
        return items is None or items != self._states.get("now")

    def capture(self) -> dict[str, tf.Tensor]:
        """Returns this process's state for `load`."""
        if not self.is_random:
            return {}
        body = {
            "moments": {**self._states, "now": self._now()},
            "epochs": self._epochs,
            "is_over": self._is_over,
            "order": self._python.order,
            "drawn": self._python.drawn_by_hooks,
        }
        return {_DATA: tf.constant(json.dumps(body))}

    def load(self, own: Mapping[str, Any], in_epoch: bool) -> None:
        """Loads the state from `capture`, for `restore`, and repeats the hooks of a `PyDataset` for the epochs that had ended.

        `own` is this rank's part of a backup; `in_epoch` tells whether the training resumes within an epoch, not at its beginning.
        """
        if not self.is_random or _DATA not in own:
            return
        body = json.loads(np.asarray(own[_DATA]).item())
        self._states = body["moments"]
        self._epochs = body["epochs"]
        self._is_over = body["is_over"]
        self.stays = in_epoch
        self._epochs_before_resume = body["is_over"]
        order = body["order"]
        # The data of the resumed epoch end once more. `order` was recorded after that end.
        if in_epoch and self._is_over:
            self._epochs -= 1
            order = None
        keras_loops.skip_epochs(self._adapter, self._epochs)
        self._python.end_epochs(self._epochs, order, body["drawn"])

    def restore(self, moment: str) -> None:
        """Restores the state at the beginning of the `"first"` pass, of this `"pass"`, or at the backup (`"now"`)."""
        if moment in self._states:
            self._assign(self._states[moment])

    def prepare_replay(self, number: int, in_pass: bool) -> Callable[[], None]:
        """Prepares a replay of the earlier passes; returns a function to call after it, before the iterator of this pass is created.

        Passes count from 1. `in_pass` tells whether the pass is that of the backup, not a new pass.
        """
        before = self._now()
        # The first pass may fill a cache, for which it draws as it did before the interruption.
        self.restore("first")

        def ready() -> None:
            if in_pass:
                self.restore("pass")
            else:
                self._assign(before)
                self.begin_pass(number)

        return ready

    def _assign(self, state: Json) -> None:
        for variable, value in zip(self._variables, from_json(state["variables"]), strict=True):
            variable.assign(value)
        self._python.restore(state["python"])

    def _now(self) -> Json:
        variables = to_json([variable.numpy() for variable in self._variables])
        return {"variables": variables, "python": self._python.state()}

    def _end_epoch(self, end: Callable[[], None]) -> None:
        if not self._has_begun:  # Keras calls it before the first epoch, too
            end()
            return
        # No step has run since the resume: the hook begins with the state at the backup, whatever reading ahead has drawn.
        if self.stays and not self._epochs_before_resume:
            self.restore("now")
        self._python.run_hook(end)
        # The hook ran before the backup, too, whose state includes what it drew.
        if self.stays and self._epochs_before_resume:
            self.restore("now")
        self._epochs += 1
        self._is_over = True
        self._python.record_order()
