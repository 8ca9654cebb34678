"""A model's step as a function that any worker can run, and run again, without counting twice.

The step runs in `keras.StatelessScope`, which records assignments to Keras' variables instead of making them. Then

- its increments of metrics and `iterations` go into a row of the results table, for the chief to add once; the chief
  computes logs that depend on metrics' results from the sums;
- seed generators start from the step's own seed, so that each step has its own masks, and the same ones if it is repeated;
  so does the global generator, from which `keras.random.*` draws without a seed;
- with several workers `tf.random.*` ignores TensorFlow's seed, from which all of them would draw the same numbers;
- its increment of a weight with `aggregation="sum"` is added on its server, so that workers lose no other's;
- everything else that it assigned (BatchNorm's moving statistics) is assigned on the servers: if two workers assign at
  once, the later value holds.

Gradients are applied within the step, by the optimizer's own arithmetic, on the server that has the variable.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Step, Structure
from tfdist.compat import keras_internals, keras_metrics, optimizer_search
from tfdist.errors import ConfigError, stop_iteration_error
from tfdist.replicas import batch_splitting, random_seeds
from tfdist.replicas.step_context import StepContext
from tfdist.step import graph_copies, losses

logger = logging.getLogger(__name__)

_NO_SUM = (
    "The metric {} keeps what is no sum, such as a maximum. Parameter servers add up what the steps have counted, each from zero, so it "
    "is wrong under parameter_server: evaluate it with another strategy, or write it with sums."
)
# Added to a seed once per step; odd, so that steps do not meet for 2**64 of them.
_SEED_STRIDE = 0x5851F42D4C957F2D
_RESULTS_DEVICE = "/job:ps/replica:0/task:0/device:CPU:0"


class WorkerStep:
    """A model's `train_step`, `test_step` or `predict_step` as a function of the data and of the chief's inputs (`step_inputs`).

    Of such steps, `rows` may be on their way or unread.
    """

    def __init__(self, model: keras.Model, step: Step, rows: int = 0):
        self._model = model
        self._step = step
        self._predicts = step == model.predict_step
        self._rows = rows
        optimizers = optimizer_search.optimizers(model)
        self._metrics = _unique(v for metric in model.metrics for v in metric.variables)
        self._iterations = [keras_internals.step_counter(optimizer) for optimizer in optimizers]
        others = [v for o in optimizers for v in o.variables if all(v is not i for i in self._iterations)]
        self._scalars = [v for v in others if v.name in keras_internals.OPTIMIZER_SCALARS]
        self._seeds = [v for v in model.variables if v.name == keras_internals.SEED_STATE]
        known = {id(v) for v in (*self._metrics, *self._iterations, *self._scalars, *self._seeds)}
        weights = [v for v in model.non_trainable_variables if id(v) not in known]
        self._sums = [v for v in weights if v.aggregation == "sum" and v.value.dtype != tf.bool]
        self._servers = [v for v in _unique((*model.variables, *others)) if id(v) not in known]
        self._functions = {
            returns: tf.function(functools.partial(self._run, returns), reduce_retracing=True, autograph=False)
            for returns in (False, True)
        }
        self._traced: dict[int, TracedStep] = {}
        self._tracing = TracedStep()
        self._last: tuple[Any, bool, TracedStep] = (None, False, self._tracing)  # most steps are as the one before
        self._attempt_ids = itertools.count(1)
        self._seed_values: list[int] = []
        self._started: list[int] = []
        self._no_sums: set[str] = set()  # metrics of which it has warned
        self._per_step = [1] * len(self._iterations)  # how often each optimizer updates in a step, as far as is known

    def begin(self) -> None:
        """Reads the seeds and the optimizers' counts of updates; call it when no step is on its way."""
        self._seed_values = [int(number) for seed in self._seeds for number in seed.numpy()]
        self._started = [int(iterations.numpy()) for iterations in self._iterations]

    def new_attempt_id(self) -> int:
        """Returns a number that no attempt at a step has had."""
        return next(self._attempt_ids)

    def step_inputs(self, attempt_id: int, row: int, number: int) -> tf.Tensor:
        """Returns a step's inputs from the chief besides data, in one vector.

        `attempt_id` and `row` are its numbers in the results table; `number` counts steps since `begin`, from 0: schedules and seeds go by it.
        """
        scalars = [float(v.numpy()) for v in self._scalars]
        counts = [start + number * per_step for start, per_step in zip(self._started, self._per_step, strict=True)]
        return tf.constant(
            [attempt_id, row, sum(self._started) + number, *counts, *scalars, *self._seed_values], tf.float64
        )

    def trace(self, data: Structure, returns: bool = False) -> TracedStep:
        """Returns the step for data of this form, a batch or its spec or the spec of an iterator.

        Keras weighs some logs by a batch size that it knows, so the traced size must not be more static than elsewhere. If `returns`, the function returns
        its counts instead of writing them to the results table. Raises ConfigError where the step uses a variable that is on no server, or
        assigns one that is not the model's.
        """
        if data is self._last[0] and returns == self._last[1]:
            return self._last[2]
        length = 3 + len(self._iterations) + len(self._scalars) + 2 * len(self._seeds)
        inputs = tf.TensorSpec([length], tf.float64)
        form = batch_splitting.without_optionals(data)
        try:
            function = run_outside_strategy_scope(lambda: self._functions[returns].get_concrete_function(form, inputs))
        except StopIteration as e:
            raise stop_iteration_error(f"The model's {self._step.__name__}", e) from e
        except Exception as e:
            if "out of scope" not in str(e):
                raise
            raise ConfigError(
                f"The {self._step.__name__} assigns a keras.Variable (an optimizer's, BatchNorm's or a metric's, for example) "
                "within tf.cond, tf.while_loop or a tf.function of its own, out of which parameter_server cannot take it: "
                "assign it outside, and leave out @tf.function."
            ) from e
        if id(function) not in self._traced:
            self._check(function)
            self._tracing.function = function
            self._traced[id(function)] = self._tracing
        self._last = data, returns, self._traced[id(function)]
        return self._last[2]

    def call(self, traced: TracedStep, data: Structure, inputs: tf.Tensor) -> list[np.ndarray]:
        """Runs a step on the current device; returns its results, flat, on the chief."""
        outputs = traced.function(data, inputs)
        return [tensor.numpy() for tensor in tf.nest.flatten(outputs, expand_composites=True)]

    def commit(self, traced: TracedStep, rows: np.ndarray) -> dict[str, float]:
        """Adds the counts of steps to the metrics and `iterations`; returns the logs that come from metrics.

        `rows` is `[steps, numbers]` float64, in the order in which to add them.
        """
        end = sum(int(np.prod(v.shape)) for v in self._metrics)
        self._per_step = [int(number) for number in rows[-1][end : end + len(self._iterations)]]
        if traced.count is None:
            form = [tf.TensorSpec([None, None], tf.float64)]
            traced.count = tf.function(functools.partial(self._add, traced), form, autograph=False)
        return {name: to_python(value) for name, value in traced.count(tf.constant(rows)).items()}

    def custom_logs(self, traced: TracedStep, row: np.ndarray) -> dict[str, Any]:
        """Returns the logs of a step that are no metrics."""
        flat, end = [], len(row)
        for value in reversed(tf.nest.flatten(traced.custom_logs)):
            start = end - value.shape.num_elements()
            flat.append(to_python(row[start:end].reshape(value.shape)))
            end = start
        return tf.nest.pack_sequence_as(traced.custom_logs, flat[::-1])

    def _run(self, returns: bool, data: Structure, inputs: tf.Tensor) -> Structure:
        if isinstance(data, tf.data.Iterator):
            data = data.get_next()
        number = inputs[2]
        sizes = [len(self._iterations), len(self._scalars), 2 * len(self._seeds)]
        counts, scalars, seeds = tf.split(inputs[3:], sizes)
        counted = [(v, tf.zeros(v.shape, v.dtype)) for v in self._metrics]
        counted += [(v, tf.cast(counts[place], v.dtype)) for place, v in enumerate(self._iterations)]
        mapped = [(v, tf.cast(scalars[place], v.dtype)) for place, v in enumerate(self._scalars)]
        stride = tf.stack([tf.cast(number, tf.int64) * _SEED_STRIDE, tf.constant(0, tf.int64)])
        for place, v in enumerate(self._seeds):
            mapped.append((v, tf.cast(tf.cast(seeds[2 * place : 2 * place + 2], tf.int64) + stride, v.dtype)))
        sums = [(v, v.value.read_value()) for v in self._sums]
        if len(self._model.distribute_strategy.cluster.jobs["worker"]) > 1:
            random_seeds.use_entropy_per_worker()
        generator = random_seeds.StepSeedGenerator(number)
        with generator.installed(), _Scope([*counted, *mapped, *sums], collect_losses=True) as scope:
            examples = batch_splitting.examples(data)
            examples = None if examples is None else tf.convert_to_tensor(examples)
            alone = StepContext(examples, is_alone=True)
            with losses.scale_losses_for_replica(self._model, alone):  # outputs' logs are means over examples
                result = self._step(data)
            results = {} if self._predicts else self._model.get_metrics_result()
        self._assign(scope, sums)
        if self._predicts:
            self._tracing = TracedStep()
            return result
        # A log named as a metric is that metric's, unless the step has not updated it.
        start = dict((id(v), value) for v, value in counted)
        idle = {
            metric.name
            for metric in self._model.metrics
            if all(scope.state_mapping.get(id(v)) is start.get(id(v)) for v in metric.variables)
        }
        own = {name: value for name, value in result.items() if name not in results or name in idle}
        self._warn_of_metrics(scope, start)
        held = {id(value := scope.get_current_value(v)): value for v in self._metrics}
        computed = {
            name: own.pop(name)
            for name in list(own)
            if graph_copies.depends_only_on(lambda t: id(t) in held, own[name])
        }
        numbers = [scope.get_current_value(v) - start for v, start in counted] + self._numbers(own)
        packed = tf.concat([tf.reshape(tf.cast(value, tf.float64), [-1]) for value in numbers], 0)
        results_table = None if returns else ResultsTable(self._rows, int(packed.shape[0]))
        self._tracing = TracedStep(results_table, own, list(result), held, computed)
        if results_table is None:
            return packed
        results_table.write(inputs[0], inputs[1], packed)
        return ()

    def _warn_of_metrics(self, scope: keras.StatelessScope, start: dict[int, tf.Tensor]) -> None:
        """Warns once of a metric to which the chief cannot add the counts of steps."""
        for metric in keras_metrics.metrics(self._model):
            state = [start[id(v)] for v in metric.variables if id(v) in start]
            ends = [scope.get_current_value(v) for v in metric.variables if id(v) in start]
            if metric.name not in self._no_sums and not all(
                graph_copies.adds_to(value, end, state) for value, end in zip(state, ends, strict=True)
            ):
                self._no_sums.add(metric.name)
                logger.warning(_NO_SUM.format(metric.name))

    def _numbers(self, own: Structure) -> list[tf.Tensor]:
        values = [tf.convert_to_tensor(value) for value in tf.nest.flatten(own)]
        for value in values:
            if value.shape.num_elements() is None or not (value.dtype.is_numpy_compatible and value.dtype != tf.string):
                raise ConfigError(
                    f"A {self._step.__name__} must return numbers of known shape. {type(self._model).__name__} returns "
                    f"{value.dtype.name} of shape {value.shape}."
                )
        return values

    def _assign(self, scope: keras.StatelessScope, sums: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
        """Assigns to the servers' variables the values that `scope` has recorded.

        To the variables in `sums` it adds the step's change since the values there.
        """
        for variable, start in sums:
            if (new := scope.state_mapping[id(variable)]) is not start:
                variable.value.assign_add(tf.cast(new, start.dtype) - start)
        for variable in self._servers:
            if id(variable) in scope.state_mapping and all(variable is not summed for summed, _ in sums):
                variable.value.assign(scope.state_mapping[id(variable)])
        known = {id(v) for v in (*self._servers, *self._metrics, *self._iterations, *self._scalars, *self._seeds)}
        if set(scope.state_mapping) - known:
            raise ConfigError(
                f"{self._step.__name__} assigns a keras.Variable that belonged to none of the model's layers, metrics and "
                "optimizers when it began: make it an attribute of the model or of a layer, and build it before fit."
            )

    def _add(self, traced: TracedStep, rows: tf.Tensor) -> Structure:
        def one(row: tf.Tensor) -> tf.Tensor:
            offset = 0
            for variable in (*self._metrics, *self._iterations):
                size = int(np.prod(variable.shape))
                added = tf.reshape(rows[row, offset : offset + size], variable.shape)
                variable.value.assign_add(tf.cast(added, variable.dtype))
                offset += size
            return row + 1

        # One after the other, as one process would.
        tf.while_loop(lambda row: row < tf.shape(rows)[0], one, [0], parallel_iterations=1)
        results = type(self._model).get_metrics_result(self._model)
        now = dict(zip(traced.held, (variable.value.read_value() for variable in self._metrics), strict=True))
        return {**results, **graph_copies.copy_to_current_graph(lambda tensor: now.get(id(tensor)), traced.computed)}

    def _check(self, function: tf.types.experimental.ConcreteFunction) -> None:
        names = {id(v.handle): v.name for v in function.graph.variables}
        for tensor in function.graph.external_captures:  # without the tables, of which each worker has its own
            if tensor.dtype == tf.resource and "/job:ps" not in (tensor.device or ""):
                if id(tensor) not in names:
                    raise ConfigError(
                        "The step uses a resource of the chief that is no variable (the writer of tf.summary, for example), which workers "
                        "cannot reach: leave it out of the step. Return numbers as logs of a train_step, or add a metric, and write "
                        "summaries in a callback, which runs on the chief."
                    )
                raise ConfigError(
                    f"The step uses {names[id(tensor)]!r}, which is not on a parameter server: create "
                    "every layer, metric and optimizer in `with trainer.scope():`."
                )


class _Scope(keras.StatelessScope):
    """A scope in which variables that are not mapped are themselves, as a tape must see them."""

    def get_current_value(self, variable: keras.Variable) -> Structure:
        value = super().get_current_value(variable)
        return keras_internals.raw_value(variable) if value is None else value


@dataclasses.dataclass(eq=False)
class TracedStep:
    """A step traced for data of one form.

    Attributes:
        results: The table to which it writes its counts; None if it returns them.
        custom_logs: The structure of the logs that no metric computes.
        names: The names of all logs.
        held: The value of each of the metrics' variables at the step's end, in its graph, by its id.
        computed: The logs that are computed from `held`.
        count: Adds the counts of steps; returns the metrics and `computed` afterwards.
    """

    results: ResultsTable | None = None
    custom_logs: Any = None
    names: Sequence[str] = ()
    held: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    computed: dict[str, Any] = dataclasses.field(default_factory=dict)
    function: Any = None
    count: Any = None

    def packed(self, arrays: Sequence[np.ndarray]) -> Structure:
        """Returns the results of `WorkerStep.call` in the structure of the step's results."""
        structure = self.function.structured_outputs
        return tf.nest.pack_sequence_as(structure, list(map(tf.constant, arrays)), expand_composites=True)


class ResultsTable:
    """Rows on the first server, one for each step in flight: its counts, written by the step and read by the chief.

    If steps returned their results, a worker that dies before its result is fetched would lose it, and fetching would cost two
    round trips for each step. A row on a server costs the step next to nothing, many are read at once, and a retried step
    overwrites its own row, so it is counted once.
    """

    def __init__(self, rows: int, width: int):
        def make() -> tf.Variable:
            with tf.device(_RESULTS_DEVICE):
                return tf.Variable(tf.zeros([rows, width + 1], tf.float64), trainable=False, name="results")

        # A step may be in tracing, which would take the variable for its own.
        self._rows = random_seeds.run_in_clean_thread(make)
        self._gather = tf.function(self._read_rows, input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)

    def write(self, attempt_id: tf.Tensor, row: tf.Tensor, numbers: tf.Tensor) -> None:
        """Writes a step's row, `[width]` float64, in the graph of the step; the other two are scalars, float64."""
        place = tf.cast(tf.reshape(row, [1]), tf.int64)
        self._rows.scatter_update(tf.IndexedSlices(tf.concat([[attempt_id], numbers], 0)[None], place))

    def read(self, attempt_ids: Sequence[int], rows: Sequence[int]) -> list[np.ndarray | None]:
        """Returns the numbers of steps that have ended, `[width]` float64 each.

        None for a step whose row another one has overwritten: one that had been given up, and came late.
        """
        # A function: a single operation would hold Python's lock while it waits, and the watch must go on (`watch.py`).
        table_rows = self._gather(tf.constant(rows, tf.int32)).numpy()
        return [
            row[1:] if row[0] == attempt_id else None for row, attempt_id in zip(table_rows, attempt_ids, strict=True)
        ]

    def _read_rows(self, rows: tf.Tensor) -> tf.Tensor:
        with tf.device(_RESULTS_DEVICE):
            return tf.gather(self._rows, rows)


def _unique(variables: Any) -> list[Any]:
    return list({id(v): v for v in variables}.values())


def run_outside_strategy_scope(function: Callable[[], Any]) -> Any:
    """Calls `function` outside of any strategy's scope, as a step runs on one device."""
    return random_seeds.run_in_clean_thread(function) if tf.distribute.has_strategy() else function()


def to_python(value: Any) -> Any:
    """Returns a number of the logs as Python's, an array of several, or a dict of them."""
    if isinstance(value, dict):
        return {name: to_python(item) for name, item in value.items()}
    value = value.numpy() if isinstance(value, tf.Tensor) else value
    return float(value) if np.ndim(value) == 0 else value
