"""A model's step as a function that any worker can run, and run again, without counting twice.

The step runs in `keras.StatelessScope`: what it assigns to Keras' variables is kept, not done. Then

- what it adds to metrics and to `iterations` is returned, for the chief to add once;
- seed generators start from a seed of the step's own, so that each step has masks of its own, the same if it is repeated;
- all else that it assigned (BatchNorm's moving statistics) is assigned on the servers: of two workers at once, the later
  one holds.

Gradients are applied within the step, by the optimizer's own arithmetic, on the server that has the variable.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import refusals
from tfdist.cures import KERAS_SEED_VARIABLE
from tfdist.errors import ConfigError

# The private names of Keras 3 that this file leans on; tests/test_keras_seams.py watches them.
KERAS_ITERATIONS = "_iterations"
KERAS_UPDATE_STEP = "update_step"
KERAS_VALUE = "_value"
KERAS_WEIGHT_DECAY = "_apply_weight_decay"

# Added to a seed once per step; odd, so that steps do not meet for 2**64 of them.
_SEED_STRIDE = 0x5851F42D4C957F2D


def update_on_servers(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes the arithmetic of updates run on the server of each variable, so that only the gradient travels. In place.

    `assign_add` and `assign_sub` are atomic there; an `assign` of a value computed from the old one (SGD's momentum) is
    not, and of two at once the later one holds.
    """
    if KERAS_UPDATE_STEP in vars(optimizer):
        return
    update_step, weight_decay = getattr(optimizer, KERAS_UPDATE_STEP), getattr(optimizer, KERAS_WEIGHT_DECAY)

    def on_server(gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        with tf.device(variable.device):
            update_step(gradient, variable, learning_rate)

    def decay(variables: Any) -> None:
        for variable in variables:
            with tf.device(getattr(variable, "value", variable).device):
                weight_decay([variable])

    setattr(optimizer, KERAS_UPDATE_STEP, on_server)
    setattr(optimizer, KERAS_WEIGHT_DECAY, decay)


class WorkerStep:
    """A step as a function of the data and of what the chief gives with it.

    Args:
        model: The model, with all its variables.
        step: Its `train_step`, `test_step` or `predict_step`.

    Attributes:
        outputs: The structure of what the step returns, once it was traced.
    """

    def __init__(self, model: keras.Model, step: Callable[[Any], Any]):
        self._model = model
        self._step = step
        optimizers = refusals.optimizers(model)
        self._metrics = _unique(v for metric in model.metrics for v in metric.variables)
        self._iterations = [getattr(optimizer, KERAS_ITERATIONS) for optimizer in optimizers]
        others = [v for o in optimizers for v in o.variables if all(v is not i for i in self._iterations)]
        self._scalars = [v for v in others if v.aggregation == "only_first_replica"]
        self._seeds = [v for v in model.variables if v.name == KERAS_SEED_VARIABLE]
        known = {id(v) for v in (*self._metrics, *self._iterations, *self._scalars, *self._seeds)}
        self._servers = [v for v in _unique((*model.variables, *others)) if id(v) not in known]
        wide = any(tf.as_dtype(v.dtype).size > 4 for v in self._metrics)
        self._dtype = tf.float64 if wide else tf.float32
        self._function = tf.function(self._run, reduce_retracing=True, autograph=False)
        self._count = tf.function(self._add, autograph=False)
        self._checked: set[int] = set()

    def concrete(self, data: Any) -> tf.types.experimental.ConcreteFunction:
        """Returns the function for data of this form, a batch or the spec of an iterator.

        It is called with data, and what `given` returns.

        Raises:
            ConfigError: The step uses a variable that is on no server, or assigns one that is not the model's.
        """
        function = _outside_of_strategies(lambda: self._function.get_concrete_function(data, *self.given(0)))
        if id(function) not in self._checked:
            self._check(function)
            self._checked.add(id(function))
        return function

    def call(self, data: Any, given: tuple[Any, ...], spec: Any = None) -> Callable[[int], Callable[[], Any]]:
        """Returns a function of the worker's number that runs the step on a batch.

        Args:
            data: The batch.
            given: From `given`.
            spec: The form of all batches of the data; None means this one's. Keras weighs some logs by a batch size that
                it knows, so it must not know here what it does not elsewhere.
        """
        data = _without_optionals(data)
        function = self.concrete(data if spec is None else _without_optionals(spec))
        return lambda worker: self.run(function, data, given)

    def run(self, function: Any, data: Any, given: tuple[Any, ...]) -> Callable[[], Any]:
        """Runs a concrete function on the device in force; returns a function that returns what it did, on the chief."""
        arrays = [tensor.numpy() for tensor in tf.nest.flatten(function(data, *given), expand_composites=True)]
        structure = function.structured_outputs
        return lambda: tf.nest.pack_sequence_as(structure, list(map(tf.constant, arrays)), expand_composites=True)

    def given(self, number: int) -> tuple[Any, ...]:
        """Returns what a step gets from the chief: its number from 0, the optimizers' scalars, and the seeds."""
        seeds = [v.value for v in self._seeds]
        return (
            tf.constant(number, tf.int64),
            [tf.convert_to_tensor(v.value) for v in self._scalars],
            [tf.identity(v) for v in seeds],
        )

    @property
    def number(self) -> int:
        """How many steps the model's own optimizer has counted."""
        return int(self._iterations[0].numpy()) if self._iterations else 0

    def commit(self, counted: tf.Tensor) -> dict[str, float]:
        """Adds what a step has counted to the metrics and `iterations`; returns the metrics' results."""
        return {name: plain(value) for name, value in self._count(counted).items()}

    def _run(self, data: Any, number: tf.Tensor, scalars: Any, seeds: Any) -> Any:
        if isinstance(data, tf.data.Iterator):
            data = data.get_next()
        counted = [(v, tf.zeros(v.shape, v.dtype)) for v in self._metrics]
        counted += [(v, tf.cast(number, v.dtype)) for v in self._iterations]
        stride = tf.stack([number * _SEED_STRIDE, tf.constant(0, tf.int64)])
        seeds = [(v, seed + tf.cast(stride, seed.dtype)) for v, seed in zip(self._seeds, seeds, strict=True)]
        scope = _Scope([*counted, *zip(self._scalars, scalars, strict=True), *seeds], collect_losses=True)
        with scope:
            result = self._step(data)
            results = self._model.get_metrics_result()
        self._assign(scope)
        if self._step.__name__ == "predict_step":
            return result
        added = [tf.cast(scope.get_current_value(v) - start, self._dtype) for v, start in counted]
        packed = tf.concat([tf.reshape(value, [-1]) for value in added], 0)
        same = isinstance(result, Mapping) and set(result) == set(results)
        return packed, {} if same else result

    def _assign(self, scope: keras.StatelessScope) -> None:
        """Does what the step assigned to the servers' variables."""
        for variable in self._servers:
            if id(variable) in scope.state_mapping:
                variable.value.assign(scope.state_mapping[id(variable)])
        known = {id(v) for v in (*self._servers, *self._metrics, *self._iterations, *self._scalars, *self._seeds)}
        if set(scope.state_mapping) - known:
            raise ConfigError(
                f"{self._step.__name__} assigns a keras.Variable that belongs to none of the model's layers, metrics and "
                "optimizers; make it an attribute of the model or of a layer."
            )

    def _add(self, counted: tf.Tensor) -> Any:
        offset = 0
        for variable in (*self._metrics, *self._iterations):
            size = (
                variable.shape.num_elements()
                if hasattr(variable.shape, "num_elements")
                else int(np.prod(variable.shape))
            )
            added = tf.reshape(counted[offset : offset + size], variable.shape)
            variable.value.assign_add(tf.cast(added, variable.dtype))
            offset += size
        return type(self._model).get_metrics_result(self._model)

    def _check(self, function: tf.types.experimental.ConcreteFunction) -> None:
        names = {id(v.handle): v.name for v in function.graph.variables}
        for tensor in function.graph.external_captures:  # without the tables, of which each worker has its own
            if tensor.dtype == tf.resource and "/job:ps" not in (tensor.device or ""):
                raise ConfigError(
                    f"The step uses {names.get(id(tensor), 'a resource')!r}, which is not on a parameter server: create "
                    "every layer, metric and optimizer in `with trainer.scope():`."
                )


class _Scope(keras.StatelessScope):
    """A scope in which variables that are not mapped are themselves, as a tape must see them."""

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        return getattr(variable, KERAS_VALUE) if value is None else value


def _unique(variables: Any) -> list[Any]:
    return list({id(v): v for v in variables}.values())


def _outside_of_strategies(function: Callable[[], Any]) -> Any:
    """Returns what `function` does where no strategy's scope is entered: a step is one device's."""
    if not tf.distribute.has_strategy():
        return function()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # scopes are of a thread
        return pool.submit(function).result()


def _without_optionals(data: Any) -> Any:
    absent = (tf.experimental.Optional, tf.OptionalSpec)
    return tf.nest.map_structure(lambda v: None if isinstance(v, absent) else v, data)


def plain(value: Any) -> Any:
    """Returns a number of the logs as Python's, or an array of several."""
    value = value.numpy() if isinstance(value, tf.Tensor) else value
    return float(value) if np.ndim(value) == 0 else value
