"""A model's step as a function that any worker can run, and run again, without counting twice.

The step runs in `keras.StatelessScope`, which records assignments to Keras' variables instead of executing them. Then

- its increments of metrics and `iterations` go into a row of the results table, for the chief to add once; the chief
  computes logs that depend on metrics' results from the sums;
- seed generators start from the step's own seed, so that each step draws its own masks, and the same masks if it is repeated;
  this includes the global generator, from which `keras.random.*` draws without a seed;
- with several workers `tf.random.*` ignores TensorFlow's seed, because all workers would draw the same numbers;
- its increment of a weight with `aggregation="sum"` is added on the weight's server, so that all workers' increments count;
- its other assignments (BatchNorm's moving statistics) are executed on the servers: if two workers assign at
  once, the later value wins.

Gradients are applied within the step, by the optimizer's own arithmetic, on the server that has the variable.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.aliases import Step, Structure
from tfdist.compat import call_stack, keras_internals, keras_metrics, optimizer_search, tapes
from tfdist.errors import ConfigError, stop_iteration_error
from tfdist.replicas import batch_splitting, random_seeds
from tfdist.replicas.step_context import StepContext
from tfdist.step import graph_copies, losses

logger = logging.getLogger(__name__)

_NO_SUM = (
    "The metric {} keeps a value that is not a sum, such as a maximum. Parameter servers add the values of the steps, each from zero, so it "
    "is wrong under parameter_server: evaluate it with another strategy, or write it with sums."
)
# Added to a seed once per step; odd, so that 2**64 steps have different seeds.
_SEED_STRIDE = 0x5851F42D4C957F2D
_RESULTS_DEVICE = "/job:ps/replica:0/task:0/device:CPU:0"


class WorkerStep:
    """A model's `train_step`, `test_step` or `predict_step` as a function of the data and of the chief's inputs (`step_inputs`).

    `rows` is the number of steps that may be in flight or unread.
    """

    def __init__(self, model: keras.Model, step: Step, rows: int = 0):
        self._model = model
        self._step = step
        self.name = getattr(step, "__name__", "step")  # a callable object has none
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
        # The arguments and the result of the last `trace`, because most steps have the same data as the step before.
        self._last_data: Any = None
        self._last_returns = False
        self._last_traced = self._tracing

        self._seed_values: list[int] = []
        self._started: list[int] = []
        self._no_sums: set[str] = set()  # names of metrics with a logged warning
        # Updates of each optimizer in a step, as counted in the last commit.
        self._per_step = [1] * len(self._iterations)

    def begin(self) -> None:
        """Reads the seeds and the optimizers' counts of updates. Call it when no step is in flight."""
        self._seed_values = [int(number) for seed in self._seeds for number in seed.numpy()]
        self._started = [int(iterations.numpy()) for iterations in self._iterations]

    def step_inputs(self, attempt_id: int, row: int, number: int) -> tf.Tensor:
        """Returns a step's inputs from the chief, except the data, in one vector.

        `attempt_id` and `row` identify the step in the results table. `number` counts steps since `begin`, from 0; schedules and seeds depend on it.
        """
        scalars = [float(v.numpy()) for v in self._scalars]
        counts = [start + number * per_step for start, per_step in zip(self._started, self._per_step, strict=True)]
        total = (
            sum(self._started) + number
        )  # differs between all steps of the training, also after a restart: it varies the seeds
        return tf.constant([attempt_id, row, total, *counts, *scalars, *self._seed_values], tf.float64)

    def trace(self, data: Structure, returns: bool = False) -> TracedStep:
        """Returns the step, traced for `data`: a batch, its spec, or the spec of an iterator.

        Keras weights some logs by the static batch size, so the traced size must not be more static than in plain Keras. If `returns`, the function
        returns its counts instead of writing them to the results table. Raises ConfigError if the step uses a variable that is on no server, or
        assigns a variable that is not the model's.
        """
        if data is self._last_data and returns == self._last_returns:
            return self._last_traced
        length = 3 + len(self._iterations) + len(self._scalars) + 2 * len(self._seeds)
        inputs = tf.TensorSpec([length], tf.float64)
        form = batch_splitting.without_optionals(data)
        try:
            function = run_outside_strategy_scope(lambda: self._functions[returns].get_concrete_function(form, inputs))
        except StopIteration as e:
            raise stop_iteration_error(f"The model's {self.name}", e) from e
        except Exception as e:
            if "out of scope" not in str(e):
                raise
            raise ConfigError(
                f"The {self.name} assigns a keras.Variable (an optimizer's, BatchNorm's or a metric's, for example) "
                "within tf.cond, tf.while_loop or a nested tf.function, from which parameter_server cannot read the value: "
                "assign it outside, and leave out @tf.function."
            ) from e
        if id(function) not in self._traced:
            self._check(function)
            self._tracing.function = function
            self._traced[id(function)] = self._tracing
        self._last_data = data
        self._last_returns = returns
        self._last_traced = self._traced[id(function)]
        return self._last_traced

    def call(self, traced: TracedStep, data: Structure, inputs: tf.Tensor) -> list[np.ndarray]:
        """Runs a step on the current device; returns its results as a flat list of arrays on the chief."""
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
        """Returns the logs of a step that no metric computes."""
        flat = []
        end = len(row)
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
        # Metrics start from zero, so that their values after the step are its increments.
        counted = [(v, tf.zeros(v.shape, v.dtype)) for v in self._metrics]
        counted += [(v, tf.cast(counts[index], v.dtype)) for index, v in enumerate(self._iterations)]
        mapped = [(v, tf.cast(scalars[index], v.dtype)) for index, v in enumerate(self._scalars)]
        # A generator's state is `[seed, counter]`: each step has another seed, and counts its own draws.
        stride = tf.stack([tf.cast(number, tf.int64) * _SEED_STRIDE, tf.constant(0, tf.int64)])
        for index, v in enumerate(self._seeds):
            mapped.append((v, tf.cast(tf.cast(seeds[2 * index : 2 * index + 2], tf.int64) + stride, v.dtype)))
        sums = [(v, v.value.read_value()) for v in self._sums]
        if len(self._model.distribute_strategy.cluster.jobs["worker"]) > 1:
            random_seeds.use_entropy_per_worker()
        generator = random_seeds.StepSeedGenerator(number)
        with (
            generator.installed(),
            _Scope([*counted, *mapped, *sums], collect_losses=True) as scope,
            tapes.hooked(_Tapes(scope)),
        ):
            examples = batch_splitting.examples(data)
            if examples is not None:
                examples = tf.convert_to_tensor(examples)
            alone = StepContext(examples, is_alone=True)
            with losses.scale_losses_for_replica(self._model, alone):  # outputs' logs are means over examples
                result = self._step(data)
            results = {} if self._predicts else self._model.get_metrics_result()
        self._assign(scope, sums)
        if self._predicts:
            self._tracing = TracedStep()
            return result
        # A log with the name of a metric is that metric's result, unless the step has not updated the metric.
        start = {id(v): value for v, value in counted}
        idle = set()
        for metric in self._model.metrics:
            if all(scope.state_mapping.get(id(v)) is start.get(id(v)) for v in metric.variables):
                idle.add(metric.name)
        custom_logs = {name: value for name, value in result.items() if name not in results or name in idle}
        self._warn_of_metrics(scope, start)
        ends = [scope.get_current_value(v) for v in self._metrics]
        held = {id(value): value for value in ends}
        # Logs that depend on metrics only: the chief computes them from the sums of all steps.
        computed = {}
        for name in list(custom_logs):
            if graph_copies.depends_only_on(lambda t: id(t) in held, custom_logs[name]):
                computed[name] = custom_logs.pop(name)
        numbers = [scope.get_current_value(v) - start for v, start in counted] + self._numbers(custom_logs)
        packed = tf.concat([tf.reshape(tf.cast(value, tf.float64), [-1]) for value in numbers], 0)
        results_table = None if returns else ResultsTable(self._rows, int(packed.shape[0]))
        self._tracing = TracedStep(results_table, custom_logs, list(result), held, computed)
        if results_table is None:
            return packed
        results_table.write(inputs[0], inputs[1], packed)
        return ()

    def _warn_of_metrics(self, scope: keras.StatelessScope, start: dict[int, tf.Tensor]) -> None:
        """Warns once of a metric to which the chief cannot add the counts of steps."""
        for metric in keras_metrics.metrics(self._model):
            variables = [v for v in metric.variables if id(v) in start]
            state = [start[id(v)] for v in variables]
            is_sum = all(graph_copies.adds_to(start[id(v)], scope.get_current_value(v), state) for v in variables)
            if not is_sum and metric.name not in self._no_sums:
                self._no_sums.add(metric.name)
                logger.warning(_NO_SUM.format(metric.name))

    def _numbers(self, own: Structure) -> list[tf.Tensor]:
        values = [tf.convert_to_tensor(value) for value in tf.nest.flatten(own)]
        for value in values:
            if value.shape.num_elements() is None or not (value.dtype.is_numpy_compatible and value.dtype != tf.string):
                raise ConfigError(
                    f"A {self.name} must return numbers of known shape. {type(self._model).__name__} returns "
                    f"{value.dtype.name} of shape {value.shape}."
                )
        return values

    def _assign(self, scope: keras.StatelessScope, sums: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
        """Assigns to the servers' variables the values that `scope` has recorded.

        Adds to each variable in `sums` the difference between the step's value and the start value in `sums`.
        """
        for variable, start in sums:
            new = scope.state_mapping[id(variable)]
            if new is not start:
                variable.value.assign_add(tf.cast(new, start.dtype) - start)
        for variable in self._servers:
            if id(variable) in scope.state_mapping and all(variable is not summed for summed, _ in sums):
                variable.value.assign(scope.state_mapping[id(variable)])
        known = {id(v) for v in (*self._servers, *self._metrics, *self._iterations, *self._scalars, *self._seeds)}
        if set(scope.state_mapping) - known:
            raise ConfigError(
                f"{self.name} assigns a keras.Variable that belonged to none of the model's layers, metrics and "
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

        # Adds the rows sequentially, as one process would.
        tf.while_loop(lambda row: row < tf.shape(rows)[0], one, [0], parallel_iterations=1)
        results = self._model.get_metrics_result()
        now = dict(zip(traced.held, (variable.value.read_value() for variable in self._metrics), strict=True))
        return {**results, **graph_copies.copy_to_current_graph(lambda tensor: now.get(id(tensor)), traced.computed)}

    def _check(self, function: tf.types.experimental.ConcreteFunction) -> None:
        names = {id(v.handle): v.name for v in function.graph.variables}
        for tensor in function.graph.external_captures:  # except lookup tables: each worker has its own
            if tensor.dtype != tf.resource or "/job:ps" in (tensor.device or ""):
                continue
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
    """A scope in which an unmapped variable evaluates to its tf.Variable, which a gradient tape must see."""

    def get_current_value(self, variable: keras.Variable) -> Structure:
        value = super().get_current_value(variable)
        return keras_internals.raw_value(variable) if value is None else value


class _Tapes:
    """The hook that rejects a gradient with respect to a weight that the step has assigned: only its server has the variable that tapes see."""

    def __init__(self, scope: _Scope):
        self._scope = scope

    def asked(self, sources: Sequence[Any]) -> None:
        for source in sources:
            if isinstance(source, keras.Variable) and not hasattr(self._scope.get_current_value(source), "handle"):
                place = call_stack.users_place()
                raise ConfigError(
                    f"{place and f'{place}: '}a gradient with respect to {source.path} after the step has assigned it is not possible under "
                    "parameter_server, whose steps read a variable once and write it at their end: train under mirrored or multi_worker_mirrored."
                )

    def returned(self, sources: Sequence[Any], grads: Sequence[Any]) -> Sequence[Any]:
        return grads

    def keeps_local(self, sources: Sequence[Any]) -> None:
        pass

    def reduced_by_hand(self, op: Any, values: Sequence[Any], reduce: Callable[[list[Any]], Sequence[Any]]) -> Any:
        return reduce(list(values))


@dataclasses.dataclass(eq=False)
class TracedStep:
    """A step that is traced for one specification of data.

    Attributes:
        results: The table to which the step writes its counts; None if the step returns them.
        custom_logs: The structure of the logs that no metric computes.
        names: The names of all logs.
        held: The values of the metrics' variables at the end of the step, as tensors of its graph, by the tensor's id.
        computed: The logs that depend only on `held`.
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
    """A table on the first server with a row for each step in flight: the step writes its counts, and the chief reads them.

    If steps returned their results, the result of a worker that dies before the fetch would be lost. Fetching would also cost two
    round trips for each step. Writing a row is cheap, the chief reads many rows at once, and a retried step overwrites its own
    row, so that it counts once.
    """

    def __init__(self, rows: int, width: int):
        def make() -> tf.Variable:
            with tf.device(_RESULTS_DEVICE):
                return tf.Variable(tf.zeros([rows, width + 1], tf.float64), trainable=False, name="results")

        # While a step is traced, the variable would become part of its graph.
        self._rows = random_seeds.run_in_clean_thread(make)
        self._gather = tf.function(self._read_rows, input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)

    def write(self, attempt_id: tf.Tensor, row: tf.Tensor, numbers: tf.Tensor) -> None:
        """Writes a step's `numbers`, `[width]` float64, in the graph of the step. `attempt_id` and `row` are float64 scalars."""
        index = tf.cast(tf.reshape(row, [1]), tf.int64)
        self._rows.scatter_update(tf.IndexedSlices(tf.concat([[attempt_id], numbers], 0)[None], index))

    def read(self, attempt_ids: Sequence[int], rows: Sequence[int]) -> list[np.ndarray | None]:
        """Returns the numbers of steps that have ended, `[width]` float64 each.

        None for a step whose row was overwritten by a late step, which had been given up.
        """
        # A tf.function, because a single operation would hold Python's lock while it waits, and block the watch (`watch.py`).
        table_rows = self._gather(tf.constant(rows, tf.int32)).numpy()
        pairs = zip(table_rows, attempt_ids, strict=True)
        return [row[1:] if row[0] == attempt_id else None for row, attempt_id in pairs]

    def _read_rows(self, rows: tf.Tensor) -> tf.Tensor:
        with tf.device(_RESULTS_DEVICE):
            return tf.gather(self._rows, rows)


def _unique(variables: Any) -> list[Any]:
    return list({id(v): v for v in variables}.values())


def run_outside_strategy_scope(function: Callable[[], Any]) -> Any:
    """Calls `function` outside of any strategy's scope, as a step runs on one device."""
    return random_seeds.run_in_clean_thread(function) if tf.distribute.has_strategy() else function()


def to_python(value: Any) -> Any:
    """Converts logs: a scalar to a float, several numbers to an array, and the values of a dict."""
    if isinstance(value, dict):
        return {name: to_python(item) for name, item in value.items()}
    if isinstance(value, tf.Tensor):
        value = value.numpy()
    return float(value) if np.ndim(value) == 0 else value
