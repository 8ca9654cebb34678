"""A scheduler of functions on any worker of a parameter-server cluster, on top of TensorFlow's `ClusterCoordinator`.

The coordinator runs a function at least once: a worker that dies may have run the function in part or in full, and another
worker runs it again. This scheduler counts one result of each function: the first that arrives on the chief.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.aliases import Structure
from tfdist.cluster import TaskSpec, preflight, reachability
from tfdist.compat import tf_cluster
from tfdist.errors import ClusterError
from tfdist.parameter_server.staleness import Staleness
from tfdist.parameter_server.strategy import ParameterServerStrategy
from tfdist.parameter_server.watch import Watch
from tfdist.runtime.log import logger
from tfdist.runtime.report import progress, stacks
from tfdist.runtime.report.task_report import PATIENCE, TIMEOUT_SECONDS

# Limit of functions in flight per worker: enough that a worker never waits for the chief.
MAX_IN_FLIGHT = 3
# Limit of further results per worker that wait for their turn behind a late result.
MAX_REORDERED = 12
# Seconds without a result after which the chief checks that all tasks run; also the interval of further checks.
_CHECK_AFTER = 5.0
# Seconds without a result after which the chief checks for servers that were given up.
_LOST_AFTER = 0.5
# Duration of a step, in seconds, after which the chief logs a warning; also the interval of further warnings.
_LONG = 30.0
_REPORT_EVERY = 10.0
# Seconds without any worker after which the training ends.
NO_WORKER_TIMEOUT = preflight.START_TIMEOUT


class Scheduler:
    """A scheduler of functions on workers, which also records lost tasks.

    Attributes:
        retried_steps: Training steps that ran again because their worker was lost. The lost worker's update may have
            been applied in whole, in part, or not at all.
        lost_workers: The numbers of the workers that are lost, and have not completed a function since.
        staleness: The staleness of training steps.
    """

    def __init__(self, strategy: ParameterServerStrategy):
        self._cluster = tf_cluster.coordinator_cluster(strategy)
        self._spec = strategy.cluster
        self._watch = Watch(strategy.cluster, strategy.start_timeout, strategy.config.timeout_seconds)
        self._timeout_seconds = strategy.config.timeout_seconds
        if self._timeout_seconds is None:
            self._timeout_seconds = TIMEOUT_SECONDS
        self.workers = len(self._spec.jobs["worker"])
        self.retried_steps = 0
        self.staleness = Staleness(strategy.max_staleness)
        self._lock = threading.Lock()
        tf.get_logger().addFilter(_is_shown)
        self.lost_workers: set[int] = set()
        self._since: dict[int, float] = {}  # when each busy worker began its function
        # When each busy worker began its step, and whether it may compile.
        self._steps: dict[int, tuple[float, bool]] = {}
        self._known: set[tuple[int, Any]] = set()  # workers and the kinds of functions that they have run
        self._warned_at = 0.0
        self._limited_at = 0.0  # when the limit of a step was last checked

    @property
    def has_lost_servers(self) -> bool:
        """True if a server was given up because it did not answer."""
        return bool(self._watch.lost_servers)

    def start(
        self,
        function: Callable[[int], Structure],
        results: queue.SimpleQueue[Any],
        key: Any,
        kind: Any,
        running: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Runs `function(worker)` in a thread of the chief; the thread's TensorFlow operations run on the worker of that number.

        Puts `(key, result, error, number of tries)` into `results`, once. A worker's first function of a `kind` may compile. Each try
        runs in the context `running()`, whose wait does not count as time of the step.
        """
        tries = 0

        def run() -> None:
            with running():
                result, error = run_once()
            results.put((key, result, error, tries))

        def run_once() -> tuple[Any, Exception | None]:
            nonlocal tries
            worker = int(tf.DeviceSpec.from_string(tf_cluster.current_device()).task)
            tries += 1
            self._since[worker] = time.monotonic()
            self._steps[worker] = self._since[worker], (worker, kind) not in self._known
            result = None
            error = None
            try:
                result = function(worker)
                self._known.add((worker, kind))
            except Exception as e:
                if _is_cluster_error(e):
                    if tf_cluster.is_worker_failure(e):
                        self._mark_lost(worker)
                    raise  # TensorFlow's coordinator runs the function again, on another worker
                # An error of the step itself is a result: if it were raised here, the coordinator would cancel all other
                # functions, and their results would be lost.
                error = _deduplicate_message(e)
            finally:
                del self._since[worker], self._steps[worker]
            self._mark_recovered(worker)
            return result, error

        with self.explain_errors():
            self._cluster.schedule(run, None, None)

    def begin_next_step(self, worker: int) -> None:
        """Notes that the function that `worker` runs begins another of its steps; call it in the function."""
        self._steps[worker] = time.monotonic(), False

    def take(self, results: queue.SimpleQueue[Any]) -> tuple[Any, Any, Exception | None, int]:
        """Waits for the next item in `results`. Raises ClusterError if a parameter server is lost, or if all workers are lost for 300 s."""
        begun = looked = time.monotonic()
        while True:
            if time.monotonic() - self._limited_at > _LOST_AFTER:  # also while other workers' results arrive
                self._end_long_step()
                self._limited_at = time.monotonic()
            try:
                return results.get(timeout=_LOST_AFTER)
            except queue.Empty:
                pass
            if self.has_lost_servers:
                raise self._server_lost(self._watch.lost_servers)
            if time.monotonic() - looked > _CHECK_AFTER:
                self._look(time.monotonic() - begun)
                looked = time.monotonic()

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turns TensorFlow's error about a lost parameter server into a `ClusterError` that names it."""
        try:
            yield
        except tf.errors.OpError as e:
            if not isinstance(e, (tf.errors.UnavailableError, tf.errors.AbortedError)) and not _is_cluster_error(e):
                raise
            cause = progress.shown_cause(e)
            if self._watch.lost_servers:
                raise self._server_lost(self._watch.lost_servers) from cause
            servers = [task for task in self._spec.tasks() if task.type == "ps"]
            # TensorFlow may report the loss before the server's port is closed: check again for some seconds.
            ends = time.monotonic() + reachability.SETTLED
            absent = reachability.unreachable_tasks(self._spec, servers)
            while not absent and time.monotonic() < ends:
                time.sleep(0.2)
                absent = reachability.unreachable_tasks(self._spec, servers)
            named = re.search(r"remote target /job:ps/replica:0/task:(\d+)", str(e))
            # The server was restarted and has lost its variables.
            if not absent and named and tf_cluster.is_server_failure(e):
                absent = {TaskSpec("ps", int(named[1])): "started again"}
            if not absent:
                raise
            raise self._server_lost(absent) from cause

    def _look(self, waited: float) -> None:
        with self.explain_errors():
            self._cluster.done()  # raises an error that the coordinator caught in another thread
        tasks = [task for task in self._spec.tasks() if task.type != "chief"]
        absent = reachability.unreachable_tasks(self._spec, tasks)
        # A silent task may be busy or have missed one check; the watch gives a task up after a longer silence.
        absent = {task: reason for task, reason in absent.items() if reason in reachability.ENDED}
        absent |= self._watch.given_up
        servers = {task: reason for task, reason in absent.items() if task.type == "ps"}
        if servers:
            raise self._server_lost(servers)
        now = time.monotonic()
        busy = {}
        for worker, since in list(self._since.items()):  # a copy, because other threads change it
            if TaskSpec("worker", worker) not in absent:
                busy[worker] = now - since
        if max(busy.values(), default=0) > _LONG and now > self._warned_at + _LONG:
            self._warned_at = now
            steps = ", ".join(f"worker:{w} has been at a step for {seconds:.0f} s" for w, seconds in busy.items())
            logger.warning(f"waiting: {steps}")
        if busy or not absent:
            return
        # While one worker is missing, TensorFlow does not reconnect another one either.
        if waited > NO_WORKER_TIMEOUT:
            raise ClusterError(
                f"No worker has worked for {waited:.0f} s: {reachability.format_tasks(self._spec, absent)}."
            )
        if now > self._warned_at + _REPORT_EVERY:
            self._warned_at = now
            logger.warning(f"waiting for {reachability.format_tasks(self._spec, absent)}")

    def _end_long_step(self) -> None:
        """Raises ClusterError if a worker has run its step for longer than the limit, since it and all servers answer."""
        if not self._timeout_seconds:
            return
        now = time.monotonic()
        silent_at = dict(self._watch.silent_at)
        for worker, (began, is_first) in list(self._steps.items()):
            task = TaskSpec("worker", worker)
            # The step may have waited for a task that did not answer: its time counts from then on.
            times = [at for other, at in silent_at.items() if other == task or other.type == "ps"]
            seconds = now - max([began, *times])
            limit = self._timeout_seconds * (PATIENCE if is_first else 1.0)
            if seconds <= limit:
                continue
            stacks.dump(f"{task} has run a step for {seconds:.0f} s")
            self._watch.hung.add(task)
            raise ClusterError(
                f"{task} has run a step for {seconds:.0f} s, longer than {limit:.0f} s. If the step is only slow, raise "
                f"Trainer(timeout_seconds={self._timeout_seconds:g}). Start the training again, to resume from its last backup."
            )

    def _server_lost(self, servers: dict[TaskSpec, str]) -> ClusterError:
        names = ", ".join(map(str, servers))
        addresses = reachability.format_tasks(self._spec, servers)
        loss = progress.Loss(names, f"{names} is lost, and with it the variables it held: {addresses}")
        progress.write(lost=loss)
        return ClusterError(f"{loss}. Start the training again, to resume from its last backup.")

    def _mark_lost(self, worker: int) -> None:
        with self._lock:
            known = worker in self.lost_workers
            self.lost_workers.add(worker)
        if not known:
            logger.warning(f"worker:{worker} is lost; the others continue, and repeat its step")

    def _mark_recovered(self, worker: int) -> None:
        if worker in self.lost_workers:
            with self._lock:
                self.lost_workers.discard(worker)
            logger.info(f"worker:{worker} is back")


def _is_shown(record: logging.LogRecord) -> bool:
    """Returns whether to show a line of TensorFlow's log: not its report of a lost worker, which `_mark_lost` words shortly.

    A supervised task's log keeps the report.
    """
    is_loss = isinstance(record.msg, str) and record.msg.startswith("Worker %s failed with")
    return not is_loss or progress.is_supervised() or logger.isEnabledFor(logging.DEBUG)


def _is_cluster_error(error: Exception) -> bool:
    """Returns whether TensorFlow's coordinator handles an error: a task is lost, or was lost briefly."""
    return (
        tf_cluster.is_worker_failure(error)
        or tf_cluster.is_server_failure(error)
        or isinstance(error, (tf.errors.CancelledError, tf.errors.DeadlineExceededError))
    )


def _deduplicate_message(error: Exception) -> Exception:
    """Removes from an error of a step the duplicate messages that each task on the error's way has added."""
    if not isinstance(error, tf.errors.OpError):
        return error
    lines: list[str] = []
    for line in error.message.splitlines():
        text = re.sub(r"^\(\d+\)\s*|\s+", " ", line.strip())
        echo = text.startswith(("Additional GRPC error information", ":UNKNOWN:Error received from peer"))
        repeated = text and not text.startswith("File") and any(text.strip() == earlier.strip() for earlier in lines)
        if not echo and not repeated:
            lines.append(text if text.startswith(" ") else line)
    return type(error)(error.node_def, error.op, "\n".join(lines)).with_traceback(error.__traceback__)


class InFlight:
    """The scheduled functions of one pass, and their results.

    The main thread calls `commit` with each result, in the order of scheduling if `ordered`, else in the order of arrival.
    `running` as for `Scheduler.start`.

    Attributes:
        retries: How often functions ran again because their worker was lost.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        commit: Callable[[Structure], None],
        ordered: bool,
        running: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self._scheduler = scheduler
        self._running = running
        self._commit = commit
        self._ordered = ordered
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: dict[int, Any] = {}  # results that arrived before their turn, by key
        self._scheduled = self._arrived = self._committed = self._drained = 0
        self.retries = 0

    @property
    def count(self) -> int:
        """The number of functions that have no result yet."""
        return self._scheduled - self._arrived

    def add(self, function: Callable[[int], Structure], kind: Any = None) -> None:
        """Schedules a function, once there is room; `kind` as for `Scheduler.start`."""
        workers = self._scheduler.workers
        # The second limit counts results that arrived before their turn: the other workers may run ahead of a late one only
        # so far, because the chief must keep their results in memory.
        most_in_flight = MAX_IN_FLIGHT * workers
        most_uncommitted = (MAX_IN_FLIGHT + MAX_REORDERED) * workers
        while self.count >= most_in_flight or self._scheduled - self._committed >= most_uncommitted:
            self._take()
        self._scheduler.start(function, self._results, self._scheduled, kind, self._running)
        self._scheduled += 1
        while not self._results.empty():
            self._take()

    def wait_for_first(self) -> None:
        """Waits until a result was committed since the last drain, or no function is in flight."""
        while self._committed == self._drained and self.count:
            self._take()

    def drain(self) -> None:
        """Waits for all results."""
        while self.count:
            self._take()
        self._drained = self._committed

    def wait_after_error(self, seconds: float = 5.0) -> None:
        """Waits, after an error, for results: at most `seconds`, and until the next error."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Exception):
            while self.count:
                self._arrive(*self._results.get(timeout=max(deadline - time.monotonic(), 0)))

    def _take(self) -> None:
        self._arrive(*self._scheduler.take(self._results))

    def _arrive(self, key: int, result: Structure, error: Exception | None, tries: int) -> None:
        self._arrived += 1
        self.retries += tries - 1
        if error is not None:
            raise error
        self._waiting[key] = result
        while self._waiting:
            # Keys count up from 0, so the number of committed results is the key whose turn it is.
            turn = self._committed if self._ordered else next(iter(self._waiting))
            if turn not in self._waiting:
                return
            self._committed += 1
            self._commit(self._waiting.pop(turn))
