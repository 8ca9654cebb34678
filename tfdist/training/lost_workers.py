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
from collections.abc import Iterator, Sequence, Set

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, reachability
from tfdist.collectives import calls, finished
from tfdist.compat import call_stack, tf_cluster
from tfdist.errors import ClusterError, DataError
from tfdist.replicas.batch_splitting import ENDED_EARLY
from tfdist.runtime import phase, progress
from tfdist.runtime.progress import Loss
from tfdist.training.hangs import HANG, REASON_PREFIX

_CHECK_EVERY = 1.0  # seconds
LOST_AFTER = 60.0  # seconds without an answer after which a worker counts as lost: sooner than TensorFlow's heartbeats, with a clearer message
_REMEDY = "Start all tasks again, to continue from the last backup if there is one."
_RESTARTED = re.compile(
    r"/job:(\w+)/(?:replica:\d+/)?task:(\d+) unexpectedly tried to connect with a different incarnation"
)
_CHIEF_RESTARTED = ("The service might have restarted", "the server has restarted")
_CALL_IT = "call it on every worker"
# How the reason of an abort ends, so that the workers that receive it know the lost task.
_LOST = re.compile(r" \(lost=([\w:, ]+)\)$")
_ABORTED = "Collective ops is aborted by"
_REMOTE = re.compile(r"remote target /job:(\w+)/(?:replica:\d+/)?task:(\d+)")
_MISMATCH = re.compile(r"Collective instance \d+ expected|Shape mismatch in the collective instance")
_DATA_ERROR = "tfdist/data_error"  # the key under which a worker publishes that it cannot read its data
_MOST_LISTED = 8  # tasks whose calls are listed: a cluster may have thousands
_ANSWER_WITHIN = 10.0  # seconds to wait for the other workers' calls


@contextlib.contextmanager
def abort_on_lost_workers(cluster: ClusterSpec, task: TaskSpec) -> Iterator[None]:
    """Aborts the collectives within the context when a worker has ended, and reports workers that do not answer.

    The chief checks all other workers; they check the chief, which ends when it loses a worker. A worker that does not answer may be
    suspended: after a minute it counts as lost. When its process resumes, it finds that the others have ended. Raises ClusterError that
    names a lost worker, or the workers' different calls; and, on all workers, DataError if one cannot read its data.
    """
    chief, *workers = cluster.training_tasks()
    others = workers if task == chief else [chief]
    done, silent = threading.Event(), reachability.SilentTasks(cluster, task)
    finished_tasks: set[TaskSpec] = set()

    def watch() -> None:
        before: set[TaskSpec] = set()
        while not done.wait(_CHECK_EVERY):
            with contextlib.suppress(tf.errors.OpError):
                data_error = tf_cluster.published(_DATA_ERROR, 0.01)
                if not done.is_set():
                    calls.abort_collectives(tf.errors.ABORTED, f"{REASON_PREFIX}{DataError.__name__}: {data_error}")
                return
            if task != chief and finished.is_published(chief):  # read it in time: the chief holds the texts
                finished_tasks.add(chief)
            absent = reachability.unreachable_tasks(cluster, others, serving=True)
            ended = {task: reason for task, reason in absent.items() if reason in reachability.ENDED}
            silent.note(absent.keys() - ended.keys())
            loss = None
            if before & ended.keys():  # seen in two checks: a single failed check may be a brief network problem
                loss = _ended(cluster, task, ended, finished_tasks)
            elif max(silent.seconds.values(), default=0.0) >= LOST_AFTER:
                loss = _silence(silent)
            if loss and not done.is_set():
                calls.abort_collectives(tf.errors.UNAVAILABLE, f"{REASON_PREFIX}{loss} (lost={loss.task})")
                return
            before = set(ended)

    threading.Thread(target=watch, daemon=True, name="tfdist-peers").start()
    try:
        yield
    except DataError as e:
        if e.is_agreed:
            raise
        error = e if REASON_PREFIX in str(e.__cause__) else DataError(f"{task}: {e}")  # another worker's, or this one's
        _publish_data_error(error)
        raise error from e
    except tf.errors.OpError as e:
        if sentence := _explain_mismatch(cluster, task, e):
            raise ClusterError(sentence) from progress.shown_cause(e)
        loss = _explain_loss(cluster, task, others, silent, finished_tasks, e)
        ends = time.monotonic() + reachability.SETTLED
        while not loss and _has_broken_off(e) and time.monotonic() < ends:
            time.sleep(0.2)
            loss = _explain_loss(cluster, task, others, silent, finished_tasks, e)
        loss = loss or _explain_break(cluster, task, others, silent, e)
        if not loss:
            raise
        if loss.task not in ("", str(task)):
            progress.mark_lost(task.name, loss)
        sentence = _sentence(loss)
        raise ClusterError(sentence) from progress.shown_cause(e)
    finally:
        done.set()


def _publish_data_error(error: DataError) -> None:
    """Sends an error to the workers that wait for this one in a collective; returns when all know it, or after some seconds.

    If several workers have an error, all raise the first that is published, or their own.
    """
    with contextlib.suppress(tf.errors.OpError):
        tf_cluster.publish(_DATA_ERROR, str(error))
    with contextlib.suppress(tf.errors.OpError):  # the chief holds the message: it must not end before all have read it
        tf_cluster.wait_at_barrier(_DATA_ERROR, int(1000 * _ANSWER_WITHIN))


def _has_broken_off(error: tf.errors.OpError) -> bool:
    """Returns whether a connection broke: TensorFlow's, or another transport's."""
    of_transport = isinstance(error, tf.errors.UnknownError) and calls.have_failed()
    return of_transport or isinstance(error, tf.errors.UnavailableError)


def _explain_loss(
    cluster: ClusterSpec,
    task: TaskSpec,
    others: Sequence[TaskSpec],
    silent: reachability.SilentTasks,
    finished_tasks: Set[TaskSpec],
    error: tf.errors.OpError,
) -> Loss | None:
    """Returns the lost worker and the message that names it, or None if all workers run. A worker that hangs reports itself."""
    if REASON_PREFIX in error.message and HANG in error.message:
        return _received(error)
    named = _named_targets(cluster, task, error)
    absent = reachability.unreachable_tasks(cluster, dict.fromkeys([*named, *others]), serving=True)
    if ended := {other: reason for other, reason in absent.items() if reason in reachability.ENDED}:
        # Others may have ended because of the task where the error began.
        first = [other for other in named if other in ended][:1]
        return _ended(cluster, task, {other: ended[other] for other in first or ended}, finished_tasks, error)
    if silent.long:
        return _silence(silent)
    match = _RESTARTED.search(error.message)
    if match or any(text in error.message for text in _CHIEF_RESTARTED):
        restarted = TaskSpec(match[1], int(match[2])) if match else cluster.chief
        return Loss(
            str(restarted),
            f"{restarted} at {cluster.address(restarted)} was restarted alone and cannot join the tasks that train",
        )
    # Another worker, which checks more tasks, has sent the reason.
    return _received(error) if REASON_PREFIX in error.message else None


def _explain_break(
    cluster: ClusterSpec,
    task: TaskSpec,
    others: Sequence[TaskSpec],
    silent: reachability.SilentTasks,
    error: tf.errors.OpError,
) -> Loss | None:
    """Returns the running worker to which a connection broke and the message that names it, or None if it is unknown."""
    if not _has_broken_off(error) or (isinstance(error, tf.errors.UnavailableError) and _ABORTED not in error.message):
        return None
    targets = _named_targets(cluster, task, error)
    known = [other for other in [*silent.returned, *targets, *others] if other != task]
    if not known or (len(others) > 1 and not silent.returned and not targets):
        return None
    other, seconds = known[0], silent.returned.get(known[0], 0.0)
    outage = f" after {seconds:.0f} s without an answer" if seconds else ""
    return Loss(
        str(other),
        f"the connection between {task} and {other} at {cluster.address(other)} broke{outage}. TensorFlow cannot restore it during "
        "training: check the network between their hosts",
    )


def _named_targets(cluster: ClusterSpec, task: TaskSpec, error: tf.errors.OpError) -> list[TaskSpec]:
    """Returns the other tasks that TensorFlow's error names: first the one where it began, then those that passed it on."""
    targets = [TaskSpec(kind, int(index)) for kind, index in _REMOTE.findall(error.message)]
    return [other for other in targets if other != task and other in cluster.tasks()]


def _received(error: tf.errors.OpError) -> Loss:
    """Returns the loss of the reason with which a worker has aborted the collectives; without a task if the reason does not name it."""
    reason = error.message.rpartition(REASON_PREFIX)[2].splitlines()[0]
    match = _LOST.search(reason)
    return Loss(match[1], reason[: match.start()]) if match else Loss("", reason)


def _sentence(loss: Loss) -> str:
    """Returns the message for a loss, with its remedy; a received reason without a task is the whole message."""
    if loss.remedy or not loss.task:
        return str(loss)
    return f"{loss} {_REMEDY}" if loss.cause.endswith("?") else f"{loss}. {_REMEDY}"


def _silence(silent: reachability.SilentTasks) -> Loss:
    return Loss(", ".join(map(str, silent.long)), silent.sentence())


def _ended(
    cluster: ClusterSpec,
    task: TaskSpec,
    ended: dict[TaskSpec, str],
    finished_tasks: Set[TaskSpec],
    error: tf.errors.OpError | None = None,
) -> Loss:
    """Returns the loss of tasks that have ended: by a failure, or because their programs need no other task any more.

    Args:
        cluster: The cluster.
        task: This process's task.
        ended: The tasks that have ended, with the reasons why they cannot be reached.
        finished_tasks: The tasks that are known to have finished.
        error: The error that the loss has caused in the main thread. None in another thread.
    """
    names = ", ".join(map(str, ended))
    if all(other in finished_tasks or finished.is_published(other) for other in ended):
        where = _own_call(error) if error else ""
        return Loss(names, f"{names} has finished its program (exit code 0), and {task} waits for it{where}", _CALL_IT)
    addresses = reachability.format_tasks(cluster, ended)
    return Loss(names, f"{addresses} has ended while {task} trained with it; see its log for the cause")


def _own_call(error: tf.errors.OpError) -> str:
    """Returns the outermost call of the trainer that an error came through and the user's line, as ` in evaluate at script.py:9`."""
    call = _describe_call(error).partition(",")[0]
    place = call_stack.users_place()
    return f" in {call} at {place}" if place else f" in {call}"


def _explain_mismatch(cluster: ClusterSpec, task: TaskSpec, error: tf.errors.OpError) -> str:
    """Returns the calls in which the workers' collectives did not match, or an empty text if `error` has another cause.

    On the worker whose data have ended, aborts the other workers' collectives; these workers then call this function, too.
    """
    call, ended = _describe_call(error), ENDED_EARLY in error.message
    if not ended and not _MISMATCH.search(error.message):
        return ""
    if ended and isinstance(error, tf.errors.InvalidArgumentError):  # raised on this worker, not sent by another one
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
    with contextlib.suppress(tf.errors.OpError):
        tf_cluster.publish(key(task), own_call)
    deadline = time.monotonic() + _ANSWER_WITHIN
    tasks = cluster.training_tasks()
    for caller in sorted({task, *tasks[:_MOST_LISTED]}, key=tasks.index):
        call = own_call if caller == task else "an unknown call"
        if caller != task:
            with contextlib.suppress(tf.errors.OpError):
                call = tf_cluster.published(key(caller), deadline - time.monotonic())
        yield caller, call
    # The chief holds the published calls: it must not end before all workers have read them.
    with contextlib.suppress(tf.errors.OpError):
        tf_cluster.wait_at_barrier("tfdist/call", max(2000, int(1000 * (deadline - time.monotonic()))))
