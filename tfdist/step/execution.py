"""The execution of a model's training, test and prediction steps on all replicas, instead of Keras' own functions."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.aliases import DataIterator, Function, Logs, Step, Structure
from tfdist.collectives.buffered import BufferedCommunicator
from tfdist.collectives.communicator import tree_sum
from tfdist.collectives.own_time import OwnTime, fetch_flag, measure_input_wait, tensors_in
from tfdist.compat import keras_internals, optimizer_search, tf_internals, unsupported
from tfdist.engine import Engine, RunningMeans
from tfdist.errors import ConfigError, stop_iteration_error
from tfdist.feature import RunningStep
from tfdist.gradients import optimizer as optimizer_lib
from tfdist.gradients.tape_sums import GradientsUsedError
from tfdist.replicas import batch_splitting, equal_weights
from tfdist.runtime.report import goodput
from tfdist.runtime.report.phase import main as phases
from tfdist.runtime.report.phase import phase
from tfdist.step import empty_replicas
from tfdist.step.prediction import Prediction, as_tensor
from tfdist.step.replica_step import BATCH_NORM_WITHOUT_EXAMPLES, PACKED, ReplicaStep
from tfdist.step.whole_batch import GATHERED_ROWS_ARE_NOT_EXAMPLES, ROWS_ARE_NOT_EXAMPLES

_FLAGS_DTYPE = "float32"  # the type of the workers' flags, which are averaged with the logs of that type


class UndrawnIterator:
    """The iterator of a loop for a function of the user's: it goes to the `Execution` that the function calls, which draws the batches."""

    def __init__(self, iterator: DataIterator):
        self.iterator = iterator

    def __iter__(self) -> UndrawnIterator:
        return self

    def __next__(self) -> Structure:
        raise ConfigError(
            "The model's own make_train_function or make_test_function draws a batch by next(iterator), and a batch is in parts, one for each "
            "replica. Override train_step or test_step instead, or pass the iterator to the function that super() makes."
        )


class Execution:
    """A model's `train_function` or `test_function`: runs up to `steps_per_execution` steps.

    It replaces the function that Keras makes in `Model._make_function`. With several replicas Keras' own function cannot run several steps in
    one execution, compiles the collectives along with the replica's computation, and reduces each number of the logs
    separately.

    Attributes:
        model: The model.
        trains: Whether the steps train.
        done: The number of steps of the last execution.
        agreed_flags: `strategy.flags`, averaged over the workers by the last call; None without flags.
        measured: The mean time that a step waits for its batch.
        input_seconds: The total time that steps have waited for their batches.
    """

    def __init__(self, model: keras.Model, engine: Engine, step: Step):
        unsupported.check_model(model)  # the model may have been compiled again, and fitted without the Trainer
        attach(model, engine)
        self.agreed_flags: tf.Tensor | None = None
        self.logs: Mapping[str, Any] | None = None
        self.measured = RunningMeans()
        self.input_seconds = 0.0
        self._strategy = model.distribute_strategy
        self._steps = int(model.steps_per_execution)
        self._replica = ReplicaStep(model, step)
        self.model = model
        self.step_name = self._replica.name
        self.trains = self._replica.trains
        self._fetching, self._is_fetching = fetch_flag(self._strategy)
        if self._strategy.num_workers > 1 and self._strategy.own_time is None:
            self._strategy.own_time = OwnTime()
            self._strategy.gauges = [*self._strategy.gauges, self._strategy.own_time.seconds]
        self._is_traced = not (model.run_eagerly or tf.config.functions_run_eagerly())
        self.done = 0
        self._start_traces()

    def __call__(self, iterator: DataIterator) -> Mapping[str, Any]:
        """Runs an execution, as Keras' own function does. Raises StopIteration if no batch remains."""
        if isinstance(iterator, UndrawnIterator):
            iterator = iterator.iterator
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            for _, batch in zip(range(self._steps), iterator, strict=False):
                self.run_batch(batch)
            return self.exact_logs()
        last_logs = self.run(iterator)
        if last_logs is None:
            raise StopIteration
        if self in (self.model.train_function, self.model.test_function):
            return last_logs
        return self.exact_logs()  # a function of the user's calls this one, and may use the logs of each execution

    def run(self, iterator: DataIterator, left: int | None = None) -> Mapping[str, Any] | None:
        """Runs an execution of at most `left` steps. Returns the last step's logs, averaged over the replicas; None if no batch remains.

        Raises:
            ConfigError: XLA cannot compile the model, a replica has no example for its BatchNormalization, a label is out of range
                (a GPU makes NaN of it), or the first step has made the replicas' weights differ.
            RuntimeError: The user's step raises StopIteration.
        """
        try:
            return self._checked(functools.partial(self._execute, iterator, left))
        except tf.errors.OutOfRangeError:
            if self._fetching is not None:
                self._fetching.assign(False)
            return None

    def run_batch(self, batch: Structure, is_whole: bool = True) -> Mapping[str, Any]:
        """Runs a step on one batch. Returns its logs, averaged over the replicas; raises the errors of `run`.

        Each replica receives its part of tensors if `is_whole`, else all of them.
        """

        def execute() -> Mapping[str, Any]:
            logs, self.agreed_flags = self._batch(tf.nest.map_structure(as_tensor, batch), is_whole)
            self.done = 1
            return logs

        return self._checked(execute)

    def _checked(self, execute: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        self._strategy.executions += 1
        phases.fetching = self._is_fetching
        is_first = self.logs is None
        if is_first and self._replica.watch_build():
            self._warn_of_compression()
        run = functools.partial(self._measured, execute)
        for feature in reversed(self._strategy.features):
            run = functools.partial(feature.execute, self, run)
        try:
            with phase("step", f"a step ({self.step_name})", is_first):
                self.logs = run()
                if is_first:
                    equal_weights.check_equal_on_replicas(self._strategy, self.model.weights)
                    equal_weights.warn_of_averages(self._strategy)
            return self.logs
        except StopIteration as e:  # TensorFlow's iterators raise OutOfRangeError
            raise stop_iteration_error(f"The model's {self.step_name}", e) from e
        except tf.errors.InvalidArgumentError as e:
            _raise_explained(e)
            raise

    def _measured(self, execute: Callable[[], Structure]) -> Structure:
        """Runs an execution; measures the task's own time."""
        own_time = self._strategy.own_time
        measured = functools.partial(own_time.execute, execute, self.trains) if own_time else execute
        try:
            return measured()
        except GradientsUsedError:
            self._sum_at_tapes()
            return measured()

    def _start_traces(self) -> None:
        """Makes the functions of an execution, without a trace."""
        self._batch = self._run_batch
        self._next: Any = self._run_single if self._steps == 1 else self._run_some
        if self._is_traced:
            self._batch = tf.function(self._run_batch, reduce_retracing=True, autograph=False)
            self._next = tf.function(self._next, reduce_retracing=True, autograph=False)
        self._of_spec: dict[Any, Function] = {}
        self._of_iterator: Any = weakref.WeakKeyDictionary()

    def _sum_at_tapes(self) -> None:
        """Lets the next execution trace the step again, with gradients that are summed where the step's tapes return them."""
        self._replica.sums_at_tapes = True
        self._start_traces()
        self._warn_of_compression()

    def _warn_of_compression(self) -> None:
        if any(map(optimizer_lib.get_reduction, optimizer_search.optimizers(self.model))):
            warnings.warn(
                f"The {self.step_name} of {type(self.model).__name__} uses its gradients before it applies them (a clip, a norm), so "
                "they are summed where its tapes return them, without compression. Use the optimizer's own global_clipnorm to keep it.",
                stacklevel=2,
            )

    @property
    def own_logs(self) -> frozenset[str]:
        """The names of the logs that features add to those of the model."""
        return self._replica.own_logs

    def computed_logs(self) -> dict[str, Any]:
        """Returns the logs that the step computes from metrics, with the metrics of all replicas. A collective."""
        return self._replica.computed.now() if self._replica.computed else {}

    def exact_logs(self) -> Mapping[str, Any]:
        """Returns the logs of the last step, those of metrics computed from all replicas. A collective if workers hold the metrics."""
        if self._strategy.num_replicas_in_sync == 1:
            return self.logs or {}
        if self._replica.computes_logs:
            return {**(self.logs or {}), **self.computed_logs()}
        own = {name: value for name, value in (self.logs or {}).items() if name in self.own_logs}
        return {name: as_number(value) for name, value in self.model.get_metrics_result().items()} | own

    def _execute(self, iterator: DataIterator, left: int | None) -> Mapping[str, Any]:
        steps = self._steps if left is None else min(self._steps, left)
        execute = self._bound(iterator) if self._is_traced else functools.partial(self._next, iterator)
        logs, self.agreed_flags, waited = execute() if self._steps == 1 else execute(tf.constant(steps))
        seconds, done = map(float, waited)
        self.done = int(done)
        if not math.isnan(seconds):
            self.input_seconds += seconds
            if self.trains:
                goodput.move(seconds, "input_wait")
            self.measured.add("perf/input_wait_ms", 1000 * seconds / done)
        return logs

    def _bound(self, iterator: DataIterator) -> Function:
        """Returns `_next` for an iterator, as a function of that iterator's tensors.

        Finding the graph of an iterator and flattening a distributed iterator take as long as a small step, so both are done once.
        Only the iterator's tensors are referenced, and only while it lives, so that it can be freed with its threads.
        """
        bound = self._of_iterator.get(iterator)
        if bound is None:
            spec = tf.type_spec_from_value(iterator)
            tensors = tf.nest.flatten(iterator, expand_composites=True)
            step_count = () if self._steps == 1 else (tf.TensorSpec([], tf.int32),)
            traced = self._next.get_concrete_function(iterator, *step_count)
            if spec not in self._of_spec:

                @functools.partial(tf.function, autograph=False)
                def of_tensors(tensors: Structure, *step_count: Any) -> Structure:
                    return traced(tf.nest.pack_sequence_as(spec, tensors, expand_composites=True), *step_count)

                self._of_spec[spec] = of_tensors.get_concrete_function(tensors, *step_count)
            bound = self._of_iterator[iterator] = functools.partial(self._of_spec[spec], tensors)
        return bound

    def _run_one(self, data: Structure, totals: tf.Tensor | None = None) -> dict[str, tf.Tensor]:
        """Runs one step; returns the packed logs, summed over this process's replicas."""
        counts = None
        if isinstance(data, batch_splitting.WholeBatch):
            data = batch_splitting.split_whole(data, self._strategy)
        if isinstance(data, batch_splitting.SplitBatch):
            counts = data.counts
            if totals is None:
                totals = batch_splitting.count_examples(data, self._strategy)
        if totals is not None:
            empty_replicas.average_statistics(self.model, totals)
        results: list[dict[str, Structure]] = []

        def run_replicas() -> None:
            if tf.executing_eagerly() and self.logs is None:
                self._replica.check_eager(data)
            with self._strategy.only_known_optimizers(), self._replica.watching_tapes():
                packed, counted = self._strategy.run(self._replica, args=(data, totals))
            if totals is not None:
                empty_replicas.leave_out_empty_replicas(self.model, totals, counted)
            results.append(packed)

        run: Callable[[], None] = run_replicas
        step = RunningStep(self.model, self.trains, data, counts, functools.partial(self._own_examples, data, counts))
        for feature in reversed(self._strategy.features):
            run = functools.partial(feature.step, step, run)
        run()
        local = self._strategy.experimental_local_results
        (packed,) = results
        return {dtype: tree_sum(local(values)) for dtype, values in packed.items()}

    def _own_examples(self, data: Structure, counts: Structure) -> tf.Tensor | int:
        """Returns the number of examples of this process's first replica; 1 if batches have no axis of examples."""
        local = self._strategy.experimental_local_results
        if counts is not None:
            return local(counts)[0][0, 0]
        examples = batch_splitting.examples(tf.nest.map_structure(lambda value: local(value)[0], data))
        return 1 if examples is None else examples

    def _run_next(self, data: Structure) -> dict[str, tf.Tensor]:
        """Runs one step, as `_run_one` does; raises OutOfRangeError if no replica has an example."""
        if not isinstance(data, batch_splitting.SplitBatch):
            return self._run_one(data)
        totals = batch_splitting.count_examples(data, self._strategy)
        with tf.control_dependencies([tf.cond(totals[0] > 0, lambda: tf.constant(0, tf.int64), _raise_end)]):
            return self._run_one(data, tf.identity(totals))

    def _run_batch(self, data: Structure, is_whole: bool) -> tuple[Mapping[str, Any], tf.Tensor | None]:
        _count_trace()
        if is_whole:
            data = batch_splitting.split_whole(data, self._strategy)
        with self._measured_step():
            return self._reduced(self._run_one(data))

    def _run_single(self, iterator: DataIterator) -> tuple[Mapping[str, Any], tf.Tensor | None, Structure]:
        _count_trace()
        with self._measured_step():
            data, waited = self._fetch(iterator.get_next)
            return *self._reduced(self._run_next(data)), (waited, 1)

    def _measured_step(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context of a step from its begin on, which measures the task's own time."""
        own_time = self._strategy.own_time
        return own_time.step() if own_time and self.trains else contextlib.nullcontext()

    def _run_some(
        self, iterator: DataIterator, steps: tf.Tensor
    ) -> tuple[Mapping[str, Any], tf.Tensor | None, Structure]:
        """Runs up to `steps` steps, as `_run_single` runs one. All of them run in the loop, so that the step is traced once."""
        _count_trace()
        # A loop variable needs an initial value, but the sizes of the logs are unknown until the step is traced. So they start empty,
        # with free sizes. Tracing records their shapes here, and they are set after the loop.
        shapes: dict[str, tf.TensorShape] = {}

        def body(done: tf.Tensor, _: Any, logs: Logs, waited: tf.Tensor) -> Structure:
            # The keys of gathering collectives contain the step's number: TensorFlow keeps the shape of a key's first use, and batches differ.
            self._replica.number = done
            # An optional, because an OutOfRangeError in the loop would lose the logs of the completed steps.
            with self._measured_step():
                data, seconds = self._fetch(iterator.get_next_as_optional)
                more, logs = tf.cond(data.has_value(), lambda: run(data.get_value(), logs), lambda: (False, logs))
            return done + tf.cast(more, tf.int32), more, logs, waited + seconds

        def run(data: Structure, logs: Logs) -> Logs:
            if not isinstance(data, batch_splitting.SplitBatch):
                return True, run_one(data, None, logs)
            # A worker whose data have ended continues with empty batches, because the others need it in their collectives. All
            # workers have the same totals, so all leave the loop at the same step.
            totals = batch_splitting.count_examples(data, self._strategy)
            return totals[0] > 0, tf.cond(totals[0] > 0, lambda: run_one(data, totals, logs), lambda: logs)

        def run_one(data: Structure, totals: tf.Tensor | None, logs: Logs) -> Structure:
            packed = self._run_one(data, totals)
            shapes.update({dtype: values.shape for dtype, values in packed.items()})
            return {**logs, **packed}

        empty_logs = {dtype.name: tf.zeros([0], dtype) for dtype in PACKED}
        done, _, logs, waited = tf.while_loop(
            lambda done, more, *_: tf.logical_and(more, done < steps),
            body,
            (0, True, empty_logs, tf.constant(0.0, tf.float64)),
            shape_invariants=(
                tf.TensorShape([]),
                tf.TensorShape([]),
                dict.fromkeys(empty_logs, tf.TensorShape([None])),
                tf.TensorShape([]),
            ),
            parallel_iterations=1,  # steps must not overlap: each reads the variables that the one before writes
        )
        self._replica.number = 0
        # Without any step, raise OutOfRangeError as `iterator.get_next` would: an empty iterator raises it within a graph.
        with tf.control_dependencies([tf.cond(done > 0, lambda: tf.constant(0, tf.int64), _raise_end)]):
            packed = {dtype: tf.ensure_shape(logs[dtype], shape) for dtype, shape in shapes.items()}
            return *self._reduced(packed), (waited, done)

    def _fetch(self, get: Callable[[], Structure]) -> tuple[Structure, tf.Tensor]:
        """Returns what `measure_input_wait` returns, and marks the time in which the step waits for this task's data."""
        if self._fetching is None:
            return measure_input_wait(get)
        marked = tf.control_dependencies([self._fetching.assign(True, read_value=False)])
        with marked, self._strategy.own_time.fetching(self._fetching):
            data, seconds = measure_input_wait(get)
        with tf.control_dependencies(tensors_in(data)):
            self._fetching.assign(False, read_value=False)
        return data, seconds

    def _reduced(self, packed: dict[str, tf.Tensor]) -> tuple[Mapping[str, Any], tf.Tensor | None]:
        """Returns the logs and the workers' flags, both averaged over the workers."""
        agreed_flags = None
        if self._strategy.traits.several_processes:
            flags = self._strategy.flags
            if flags is not None:
                # The logs are summed among workers with equal pieces, so the other workers' flags are added before.
                with tf.control_dependencies([*packed.values()]):
                    flags = self._strategy.sum_over_pieces(tf.identity(flags))
            if flags is not None:  # they travel with the logs of their type, without a collective of their own
                packed = {**packed, _FLAGS_DTYPE: tf.concat([packed.get(_FLAGS_DTYPE, []), flags], 0)}
            packed = self._sum_over_workers(packed)
            if flags is not None:
                packed[_FLAGS_DTYPE], sums = tf.split(packed[_FLAGS_DTYPE], [-1, flags.shape[0]])
                agreed_flags = sums / self._strategy.num_workers
        replicas = tf_internals.num_replicas(self._strategy)
        return self._replica.unpack({dtype: values / replicas for dtype, values in packed.items()}), agreed_flags

    def _sum_over_workers(self, packed: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        group = self._strategy.communicator
        if self.trains and isinstance(group, BufferedCommunicator):
            # TensorFlow's collective takes two round trips more. It ends test steps of unlike data, which no gradient's exchange does.
            (sums,) = group.all_reduce([list(packed.values())])
            return dict(zip(packed, sums, strict=True))
        per_replica = self._strategy.run(lambda: self._on_first_replica(packed))
        return {dtype: self._strategy.reduce("SUM", value, axis=None) for dtype, value in per_replica.items()}

    def _on_first_replica(self, packed: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns a process's sums on its first replica, and zeros on the others."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        is_first = tf.get_static_value(replica) == self._strategy.local_replicas[0]
        return packed if is_first else tf.nest.map_structure(tf.zeros_like, packed)


def _raise_explained(error: tf.errors.InvalidArgumentError) -> None:
    """Raises ConfigError if the cause of a step's error is known, and is the user's to change."""
    for known in (BATCH_NORM_WITHOUT_EXAMPLES, ROWS_ARE_NOT_EXAMPLES, GATHERED_ROWS_ARE_NOT_EXAMPLES):
        if known in error.message:
            raise ConfigError(known) from error
    label = re.search(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)", error.message)
    if label:
        raise ConfigError(
            f"A batch has the label {label[1]}, and the model {label[2]} classes: labels go from 0 to {int(label[2]) - 1}."
        ) from error
    if "unsupported operations" in error.message:
        match = re.search(r"on XLA\w*: (.*?)[ {(]", error.message)
        operation = match[1] if match else "an operation"
        raise ConfigError(
            f"jit_compile=True: XLA cannot compile {operation} of this model; compile the model with jit_compile=False."
        ) from error


def _count_trace() -> None:
    """Counts, within a function's Python body, that it is traced: the execution may compile."""
    if not tf.executing_eagerly():
        phases.traces += 1


def _raise_end() -> tf.Tensor:
    """Raises OutOfRangeError, also within a tf.function."""
    # The graph makes the iterator when it needs one. A captured iterator would run its threads as long as anything keeps the graph:
    # TensorFlow never forgets the graph of a custom gradient.
    return iter(tf.data.Dataset.range(0)).get_next()


def attach(model: keras.Model, engine: Engine) -> None:
    """Makes Keras use `Execution` and `Prediction` for `model`, and attaches the strategy's features to it and its optimizers, in place."""
    if not keras_internals.has_replaced_make_function(model):
        model.train_function = model.test_function = model.predict_function = None
    keras_internals.replace_make_function(model, functools.partial(Execution, model, engine))
    keras_internals.replace_make_prediction(model, functools.partial(Prediction, model))
    strategy = model.distribute_strategy
    if not strategy.features:  # a strategy that `create_strategy` has not made
        strategy.configure(strategy.config)
    features = strategy.features
    for feature in features:
        feature.attach_model(model, engine)
    for optimizer in optimizer_search.optimizers(model):
        for feature in features:
            feature.attach(model, optimizer, engine)


def as_number(value: Structure) -> Any:
    """Returns the value of a variable among logs; returns other logs unchanged."""
    return keras.ops.convert_to_numpy(value) if isinstance(value, (keras.Variable, tf.Variable)) else value
