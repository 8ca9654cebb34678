"""The own time of a task: from the end of an execution until the gradients of the next step are ready, without waits for other tasks.

All workers end a step together, so their step times are equal, whoever is slow; their own times differ.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.compat import tf_cluster, tf_internals
from tfdist.runtime.report.phase import phase
from tfdist.strategy import Strategy, as_ours

_Result = TypeVar("_Result")
_thread_waits = threading.local()  # by thread: the wait of one thread does not delay another


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Marks a wait of this thread's Python code for other tasks, which no own time includes."""
    begun = time.perf_counter()
    try:
        with phase("exchange"):
            yield
    finally:
        _thread_waits.seconds = _waited() + time.perf_counter() - begun


def _waited() -> float:
    """Returns the seconds that this thread has waited for other tasks so far."""
    return getattr(_thread_waits, "seconds", 0.0)


class OwnTime:
    """The own time of this task, summed over the steps of training since the last `take`.

    Python's clock measures the time between two executions: callbacks, and input that Python code reads. TensorFlow's clock
    measures each step: from its start until all gradients of this process are ready, without the collectives that the step waits for.
    A step that applies several optimizers is measured until the first one's gradients.

    Attributes:
        seconds: The part that steps have measured since the start, a variable.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            # Not a variable of the strategy, in whose scope this may be.
            self.seconds = tf_cluster.ResourceVariable(0.0, dtype=tf.float64, trainable=False, name="own_seconds")
        self._taken = 0.0  # `seconds` at the last `take`
        self._between = 0.0  # seconds between executions
        self._executions = self._gaps = 0  # executions, and those before which the time was measured
        self._ended: tuple[float, float] | None = None  # time and waits at the end of the last execution
        # The start of the step that is being traced; None once its gradients are ready.
        self._begun: tf.Tensor | None = None
        self._waits: list[tf.Tensor] = []  # the waits of that step so far
        # While a step's data are traced: the variable that is true while the step waits for its own data.
        self._fetching: Any = None

    def execute(self, execution: Callable[[], _Result], trains: bool) -> _Result:
        """Runs an execution and returns its result; measures the time since the last one if both train."""
        ended = self._ended
        self._ended = None
        self._executions += trains
        if trains and ended is not None:
            self._gaps += 1
            self._between += time.perf_counter() - ended[0] - (_waited() - ended[1])
        result = execution()
        if trains:
            self._ended = time.perf_counter(), _waited()
        return result

    def skip(self) -> None:
        """Excludes the time until the next execution, such as the end of an epoch."""
        self._ended = None

    def take(self) -> float:
        """Returns the seconds since the last call; NaN if no step was measured."""
        total = float(self.seconds.numpy())
        seconds = total - self._taken
        between = self._between
        if self._gaps:  # short epochs have few gaps
            between *= self._executions / self._gaps
        self._taken = total
        self._between = 0.0
        self._executions = self._gaps = 0
        return seconds + between if seconds > 0 else float("nan")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures the step that is traced, or runs eagerly, within the context. With deterministic operations TensorFlow has no clock."""
        self._waits = []
        self._begun = None if tf_internals.is_op_determinism_enabled() else tf.timestamp()
        try:
            yield
        finally:
            self._begun = None

    @contextlib.contextmanager
    def fetching(self, flag: Any) -> Iterator[None]:
        """Makes `flag`, a variable, false before a collective within the context: TensorFlow's iterators also wait for the other tasks' data."""
        self._fetching = flag
        try:
            yield
        finally:
            self._fetching = None

    @property
    def is_measuring(self) -> bool:
        """Returns whether a step is measured whose gradients are not ready yet."""
        return self._begun is not None

    def wait(self, value: Structure, collective: Callable[[], _Result]) -> _Result:
        """Returns the result of a collective; excludes the time between `value`, its input, and the result.

        Replicas of one process wait together, so only the wait of the first one is subtracted.
        """
        if self._fetching is not None:
            with tf.control_dependencies(_first_elements(value)):
                self._fetching.assign(False, read_value=False)
        if self._begun is None:
            with waiting() if tf.executing_eagerly() else contextlib.nullcontext():
                return collective()
        context = tf.distribute.get_replica_context()  # outside of all strategies it is that of the default strategy
        ours = as_ours(context.strategy) if context else None
        if ours and tf.get_static_value(context.replica_id_in_sync_group) != ours.local_replicas[0]:
            return collective()
        begun = _time_of(value)
        result = collective()
        self._waits.append(_time_of(result) - begun)
        return result

    def on_gradients(self, strategy: tf.distribute.Strategy, grads: Any) -> None:
        """Adds the time of the step until the gradients of all replicas of this process are ready. Call it in cross-replica context."""
        if self._begun is None:
            return
        seconds = _time_of([strategy.experimental_local_results(grad) for grad in grads]) - self._begun
        self._begun = None
        self.seconds.assign_add(tf.add_n([seconds, *(-wait for wait in self._waits)]), read_value=False)


def _time_of(values: Structure) -> tf.Tensor:
    """Returns the time at which all of the values are ready."""
    with tf.control_dependencies(_first_elements(values)):
        return tf.timestamp()


def _first_elements(values: Structure) -> list[tf.Tensor]:
    """Returns the first element of each tensor: what waits for it waits for the tensor."""
    # TensorFlow does not fuse a product with its bias and activation if an operation waits for the activation without reading it. The
    # unfused ones differ in the last bit, and one process, which measures no own time, fuses them.
    return [tf.reshape(tensor, [-1])[:1] for tensor in tensors_in(values)]


def tensors_in(values: Structure) -> list[tf.Tensor]:
    """Returns the tensors of a structure, those of ragged and sparse tensors among them."""
    return [value for value in tf.nest.flatten(values, expand_composites=True) if isinstance(value, tf.Tensor)]


def own_time_of(strategy: object) -> OwnTime | None:
    """Returns the own time that a strategy measures; None if it has no other task to wait for."""
    ours = as_ours(strategy)
    return ours.own_time if ours else None


def leave_out_wait(strategy: object, value: Structure, collective: Callable[[], _Result]) -> _Result:
    """Returns the result of a collective with the input `value` in a step, without counting its wait as this task's own time."""
    own_time = own_time_of(strategy)
    return own_time.wait(value, collective) if own_time else collective()


def fetch_flag(strategy: Strategy) -> tuple[Any, Callable[[], bool]]:
    """Returns a variable that is true while a step waits for this task's data, and a function that reads it; None with one worker."""
    if not strategy.traits.several_processes or strategy.num_workers == 1:
        return None, bool
    with tf.init_scope(), tf.device("CPU:0"):
        flag = tf_cluster.ResourceVariable(False)
    return flag, lambda: bool(flag.numpy())


def measure_input_wait(get: Callable[[], Structure]) -> tuple[Structure, tf.Tensor]:
    """Returns the result of `get`, and the seconds until all of its tensors were available, a float64 scalar.

    The graph draws its own data, so only the graph can measure how long a step waits for its batch. The seconds are NaN
    with deterministic operations, because TensorFlow then has no clock.
    """
    if tf_internals.is_op_determinism_enabled():
        return get(), tf.constant(float("nan"), tf.float64)
    begun = tf.timestamp()
    with tf.control_dependencies([begun]):
        data = get()
    with tf.control_dependencies(tensors_in(data)):
        return data, tf.timestamp() - begun
