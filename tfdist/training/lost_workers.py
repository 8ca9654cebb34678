"""Whether the workers that train together are there: one that ends alone must not leave the others waiting.

TensorFlow's own heartbeats notice a lost worker after two minutes where no connection of theirs was in use. The system that a
process ran on says at once that nothing listens at its port any more.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, missing_tasks, reachability, silent_tasks
from tfdist.collectives import calls
from tfdist.errors import ClusterError
from tfdist.training import mismatch

_EVERY = 1.0  # seconds
_GIVEN_UP = 60.0  # seconds without an answer, after which a worker counts as lost: before TensorFlow's heartbeats say so in its words
_REMEDY = "Start all tasks again, to go on from the last backup if there is one."
_TOLD = "tfdist: "  # how the reason begins for which this process ends the collectives of all
_RESTARTED = re.compile(
    r"/job:(\w+)/(?:replica:\d+/)?task:(\d+) unexpectedly tried to connect with a different incarnation"
)
_CHIEF_RESTARTED = ("The service might have restarted", "the server has restarted")


@contextlib.contextmanager
def abort_on_lost_workers(cluster: ClusterSpec, task: TaskSpec) -> Iterator[None]:
    """Ends the collectives of what is inside when a worker has ended, and says when one does not answer.

    The chief asks all others, and the others ask the chief, which ends when it has missed one. One that does not answer may be
    stopped for a while: after a minute it counts as lost. Its own process, once it runs again, finds that the others have ended.

    Args:
        cluster: The cluster, of workers that train in step.
        task: This process's task.

    Raises:
        ClusterError: A worker has ended, or did not answer; names it. Or workers do different things at once.
    """
    chief, *workers = cluster.training_tasks()
    others = workers if task == chief else [chief]
    done, silent = threading.Event(), silent_tasks.SilentTasks(cluster, task)

    def watch() -> None:
        before: set[TaskSpec] = set()
        while not done.wait(_EVERY):
            absent = reachability.unreachable_tasks(cluster, others, serving=True)
            ended = {task: reason for task, reason in absent.items() if reason in reachability.ENDED}
            silent.note(absent.keys() - ended.keys())
            lost = ""
            if before & ended.keys():  # twice: the network may have hesitated
                lost = _ended_sentence(cluster, task, ended)
            elif max(silent.seconds.values(), default=0.0) >= _GIVEN_UP:
                lost = f"{silent.sentence()} {_REMEDY}"
            if lost and not done.is_set():
                calls.abort_collectives(tf.errors.UNAVAILABLE, f"{_TOLD}{lost}")
                return
            before = set(ended)

    threading.Thread(target=watch, daemon=True, name="tfdist-peers").start()
    try:
        yield
    except tf.errors.OpError as e:
        sentence = mismatch.explain_mismatch(cluster, task, e) or _explain_loss(cluster, task, others, silent, e)
        ends = time.monotonic() + reachability.SETTLED
        while not sentence and _has_broken_off(e) and time.monotonic() < ends:
            time.sleep(0.2)
            sentence = _explain_loss(cluster, task, others, silent, e)
        if sentence:
            raise ClusterError(sentence) from e
        raise
    finally:
        done.set()


def _has_broken_off(error: tf.errors.OpError) -> bool:
    """Whether a connection has: TensorFlow's, or one of another transport."""
    of_transport = isinstance(error, tf.errors.UnknownError) and calls.have_failed()
    return of_transport or isinstance(error, tf.errors.UnavailableError)


def _explain_loss(
    cluster: ClusterSpec,
    task: TaskSpec,
    others: Sequence[TaskSpec],
    silent: silent_tasks.SilentTasks,
    error: tf.errors.OpError,
) -> str:
    """Returns which worker has been lost, or an empty text where none has."""
    absent = reachability.unreachable_tasks(cluster, others, serving=True)
    if ended := {task: reason for task, reason in absent.items() if reason in reachability.ENDED}:
        return _ended_sentence(cluster, task, ended)
    if sentence := silent.sentence():
        return f"{sentence} {_REMEDY}"
    found = _RESTARTED.search(error.message)
    if found or any(text in error.message for text in _CHIEF_RESTARTED):
        again = TaskSpec(found[1], int(found[2])) if found else cluster.chief
        return f"{again} at {cluster.address(again)} was started again alone, which cannot join those that train. {_REMEDY}"
    # Another worker, which asks more of them, has told why.
    return error.message.rpartition(_TOLD)[2].splitlines()[0] if _TOLD in error.message else ""


def _ended_sentence(cluster: ClusterSpec, task: TaskSpec, ended: dict[TaskSpec, str]) -> str:
    names = missing_tasks.format_tasks(cluster, ended)
    return f"{names} has ended while {task} trained with it; see its log for the cause. {_REMEDY}"
