"""Detection of lost workers: aborts the other workers' collectives, so that they do not wait forever, and explains why.

If no connection to a lost worker was in use, TensorFlow's heartbeats notice the loss only after three minutes. The operating system
refuses connections to the port of an ended process at once. A connection that breaks while both workers run is as final as a loss:
TensorFlow reconnects, but the calls in flight fail, and all later collectives of the process fail, too.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, reachability
from tfdist.collectives import calls, finished
from tfdist.compat import call_stack, tf_cluster
from tfdist.errors import ClusterError, DataError
from tfdist.replicas.batch_splitting import ENDED_EARLY
from tfdist.runtime.report import phase, progress
from tfdist.runtime.report.progress import Loss
from tfdist.training.hangs import HANG, REASON_PREFIX, REMEDY

_CHECK_EVERY = 1.0  # seconds
LOST_AFTER = 60.0  # seconds without an answer after which a worker counts as lost: sooner than TensorFlow's heartbeats, with a clearer message
_RESTARTED = re.compile(
    r"/job:(\w+)/(?:replica:\d+/)?task:(\d+) unexpectedly tried to connect with a different incarnation"
)
_CHIEF_RESTARTED = ("The service might have restarted", "the server has restarted")
_CALL_IT = "call it on every worker"
# How the reason of an abort ends, so that the workers that receive it know the lost task.
_LOST = re.compile(r" \(lost=([\w:, ]+)\)$")
_ABORTED = "Collective ops is aborted by"
_REMOTE = re.compile(r"remote target /job:(\w+)/(?:replica:\d+/)?task:(\d+)")
_MISMATCH = re.compile(
    r"Collective instance \d+ expected|Shape mismatch in the collective instance|called another collective"
)
_NO_DATA = "tfdist/no_data"  # the key under which a worker publishes why it takes part in no more steps
_MOST_LISTED = 8  # tasks whose calls are listed: a cluster may have thousands
_ANSWER_WITHIN = 10.0  # seconds to wait for the other workers' calls


@contextlib.contextmanager
def abort_on_lost_workers(cluster: ClusterSpec, task: TaskSpec) -> Iterator[None]:
    """Aborts the collectives within the context when a worker has ended, and reports workers that do not answer.

    The chief checks all other workers; they check the chief, which ends when it loses a worker. A worker that does not answer may be
    suspended: after a minute it counts as lost. When its process resumes, it finds that the others have ended. Raises ClusterError that
    names a lost worker, or the workers' different calls; and, on all workers, DataError if one cannot read its data.
    """
    peers = _Peers(cluster, task)
    threading.Thread(target=peers.watch, daemon=True, name="tfdist-peers").start()
    try:
        yield
    except DataError as e:
        if e.is_agreed:
            raise
        error = e
        if REASON_PREFIX not in str(e.__cause__):  # it is this worker's own error, not one that another has sent
            error = DataError(f"{task}: {e}")
        # The others wait for this worker in a collective. If several have an error, all raise the first that is published, or their own.
        tf_cluster.try_publish(_NO_DATA, f"{DataError.__name__}: {error}")
        _wait_until_read(_NO_DATA, _ANSWER_WITHIN)
        raise error from e
    except tf.errors.OpError as e:
        sentence = _explain_mismatch(cluster, task, e) or peers.explain(e)
        if not sentence:
            raise
        raise ClusterError(sentence) from progress.shown_cause(e)
    finally:
        peers.done.set()


def _wait_until_read(barrier: str, seconds: float) -> None:
    """Waits until all workers have read a published text. The chief holds it: if the chief ended earlier, others could not read it."""
    try:
        tf_cluster.wait_at_barrier(barrier, int(1000 * seconds))
    except tf.errors.OpError:  # some workers do not come; this one ends with its error all the same
        pass


class _Peers:
    """The other tasks, as a thread of this task sees them while it trains.

    Attributes:
        done: Set when the training has ended.
    """

    def __init__(self, cluster: ClusterSpec, task: TaskSpec):
        self._cluster = cluster
        self._task = task
        chief, *workers = cluster.training_tasks()
        # The workers need not check each other: the chief ends when it loses one, which they notice.
        self._checked = workers if task == chief else [chief]
        self._silent = reachability.SilentTasks(cluster, task)
        self._finished: set[TaskSpec] = set()
        self.done = threading.Event()

    def watch(self) -> None:
        """Aborts the collectives of this process if another task is lost, or has no data."""
        before: set[TaskSpec] = set()
        while not self.done.wait(_CHECK_EVERY):
            reason = tf_cluster.find_published(_NO_DATA, 0.01)
            if reason:
                self._abort(tf.errors.ABORTED, reason)
                return
            # The chief holds these texts. After its end they cannot be read, so its own is read while it runs.
            chief = self._cluster.chief
            if self._task != chief and finished.is_published(chief):
                self._finished.add(chief)
            absent = reachability.unreachable_tasks(self._cluster, self._checked, serving=True)
            ended = {task: reason for task, reason in absent.items() if reason in reachability.ENDED}
            self._silent.note(absent.keys() - ended.keys())
            loss = None
            # Two checks must fail: a single one may be a brief network problem.
            if before & ended.keys():
                loss = self._ended(ended)
            elif max(self._silent.seconds.values(), default=0.0) >= LOST_AFTER:
                loss = self._silence()
            if loss:
                self._abort(tf.errors.UNAVAILABLE, f"{loss} (lost={loss.task})")
                return
            before = set(ended)

    def _abort(self, code: int, reason: str) -> None:
        # The checks take seconds, in which the training may have ended: later collectives of the process must not fail.
        if not self.done.is_set():
            calls.abort_collectives(code, f"{REASON_PREFIX}{reason}")

    def explain(self, error: tf.errors.OpError) -> str:
        """Returns the message about the task that an error is due to, which it reports to the supervisor; empty if no task is lost."""
        loss = self._explain_loss(error)
        # The kernel closes a killed process's connections before its port, so for some seconds the task still seems to run.
        ends = time.monotonic() + reachability.SETTLED
        while not loss and _has_broken_off(error) and time.monotonic() < ends:
            time.sleep(0.2)
            loss = self._explain_loss(error)
        loss = loss or self._explain_break(error)
        if not loss:
            return ""
        if loss.task not in ("", str(self._task)):
            progress.write(lost=loss)
        # A received reason without a task is the whole message.
        if loss.remedy or not loss.task:
            return str(loss)
        end = "" if loss.cause.endswith("?") else "."
        return f"{loss}{end} {REMEDY}"

    def _explain_loss(self, error: tf.errors.OpError) -> Loss | None:
        """Returns the lost worker and the message that names it, or None if all workers run. A worker that hangs reports itself."""
        received = REASON_PREFIX in error.message
        if received and HANG in error.message:
            return _received(error)
        named = self._named_targets(error)
        absent = reachability.unreachable_tasks(self._cluster, dict.fromkeys([*named, *self._checked]), serving=True)
        ended = {task: reason for task, reason in absent.items() if reason in reachability.ENDED}
        if ended:
            # Others may have ended because of the task where the error began.
            first = [task for task in named if task in ended][:1]
            return self._ended({task: ended[task] for task in first or ended}, error)
        if self._silent.long:
            return self._silence()
        match = _RESTARTED.search(error.message)
        if match:
            return self._restarted(TaskSpec(match[1], int(match[2])))
        if any(text in error.message for text in _CHIEF_RESTARTED):
            return self._restarted(self._cluster.chief)
        # Another worker, which checks more tasks, may have sent the reason.
        return _received(error) if received else None

    def _explain_break(self, error: tf.errors.OpError) -> Loss | None:
        """Returns the running worker to which a connection broke and the message that names it, or None if it is unknown."""
        if not _has_broken_off(error):
            return None
        # A remote file system's error is an UnavailableError, too.
        if isinstance(error, tf.errors.UnavailableError) and _ABORTED not in error.message:
            return None
        suspected = [*self._silent.returned, *self._named_targets(error)]
        # With one task to check, the connection was to that one.
        if not suspected and len(self._checked) == 1:
            suspected = self._checked
        if not suspected:
            return None
        other = suspected[0]
        seconds = self._silent.returned.get(other, 0.0)
        outage = f" after {seconds:.0f} s without an answer" if seconds else ""
        return Loss(
            str(other),
            f"the connection between {self._task} and {other} at {self._cluster.address(other)} broke{outage}. TensorFlow cannot restore it during "
            "training: check the network between their hosts",
        )

    def _named_targets(self, error: tf.errors.OpError) -> list[TaskSpec]:
        """Returns the other tasks that TensorFlow's error names: first the one where it began, then those that passed it on."""
        targets = [TaskSpec(kind, int(index)) for kind, index in _REMOTE.findall(error.message)]
        return [other for other in targets if other != self._task and other in self._cluster.tasks()]

    def _silence(self) -> Loss:
        return Loss(", ".join(map(str, self._silent.long)), self._silent.sentence())

    def _restarted(self, task: TaskSpec) -> Loss:
        address = self._cluster.address(task)
        return Loss(str(task), f"{task} at {address} was restarted alone and cannot join the tasks that train")

    def _ended(self, ended: dict[TaskSpec, str], error: tf.errors.OpError | None = None) -> Loss:
        """Returns the loss of tasks that have ended: by a failure, or because their programs need no other task any more.

        `error` is the error that the loss has caused in the main thread; None in the watch's thread.
        """
        names = ", ".join(map(str, ended))
        if all(task in self._finished or finished.is_published(task) for task in ended):
            where = _own_call(error) if error else ""
            cause = f"{names} has finished its program (exit code 0), and {self._task} waits for it{where}"
            return Loss(names, cause, _CALL_IT)
        addresses = reachability.format_tasks(self._cluster, ended)
        return Loss(names, f"{addresses} has ended while {self._task} trained with it; see its log for the cause")


def _has_broken_off(error: tf.errors.OpError) -> bool:
    """Returns whether a connection broke: TensorFlow's, or another transport's."""
    of_transport = isinstance(error, tf.errors.UnknownError) and calls.have_failed()
    return of_transport or isinstance(error, tf.errors.UnavailableError)


def _received(error: tf.errors.OpError) -> Loss:
    """Returns the loss of the reason with which a worker has aborted the collectives; without a task if the reason does not name it."""
    reason = error.message.rpartition(REASON_PREFIX)[2].splitlines()[0]
    match = _LOST.search(reason)
    if not match:
        return Loss("", reason)
    return Loss(match[1], reason[: match.start()])


def _own_call(error: tf.errors.OpError) -> str:
    """Returns the outermost call of the trainer that an error came through and the user's line, as ` in evaluate at script.py:9`."""
    call = _describe_call(error).partition(",")[0]
    place = call_stack.users_place()
    if not place:
        return f" in {call}"
    return f" in {call} at {place}"


def _explain_mismatch(cluster: ClusterSpec, task: TaskSpec, error: tf.errors.OpError) -> str:
    """Returns the calls in which the workers' collectives did not match, or an empty text if `error` has another cause.

    On the worker whose data have ended, aborts the other workers' collectives; these workers then call this function, too.
    """
    call = _describe_call(error)
    ended = ENDED_EARLY in error.message
    if not ended and not _MISMATCH.search(error.message):
        return ""
    if ended and isinstance(error, tf.errors.InvalidArgumentError):  # raised on this worker, not sent by another one
        tf_cluster.try_publish(_NO_DATA, ENDED_EARLY)  # for workers that wait in another transport than TensorFlow's
        calls.abort_collectives(tf.errors.ABORTED, ENDED_EARLY)
        call += ", without data left"
    calls_of_all = "; ".join(f"{caller} was in {call}" for caller, call in _exchange_calls(cluster, task, call))
    if ended:
        return (
            f"A dataset has fewer batches on some workers than on others ({calls_of_all}). Give all workers the same dataset: each "
            "trains on its share. Or give a function (tf.distribute.InputContext) -> tf.data.Dataset, whose datasets may differ in "
            "length."
        )
    return (
        f"Workers did different things at once: {calls_of_all}. All must make the same calls in the same order, with data of the same "
        "length, and so must their callbacks: one that evaluates, predicts or saves must be given to all workers."
    )


def _describe_call(error: BaseException) -> str:
    """Returns the calls of the trainer and of callbacks that an error came through, from the outside in."""
    call, *others = [*phase.labels(error), ""]
    names = [call, *call_stack.callback_calls(error), *others]
    return ", ".join(dict.fromkeys(filter(None, names))) or "a collective of the user's program"


def _exchange_calls(cluster: ClusterSpec, task: TaskSpec, own_call: str) -> Iterator[tuple[TaskSpec, str]]:
    """Yields tasks and their calls, published through TensorFlow's coordination service; a call not published in time is unknown."""
    key = "tfdist/call/{}".format
    tf_cluster.try_publish(key(task), own_call)
    deadline = time.monotonic() + _ANSWER_WITHIN
    tasks = cluster.training_tasks()
    for caller in sorted({task, *tasks[:_MOST_LISTED]}, key=tasks.index):
        if caller == task:
            yield caller, own_call
        else:
            yield caller, tf_cluster.find_published(key(caller), deadline - time.monotonic()) or "an unknown call"
    _wait_until_read("tfdist/call", max(2.0, deadline - time.monotonic()))
