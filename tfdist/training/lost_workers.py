"""Whether the workers that train together are there: one that ends alone must not leave the others waiting.

TensorFlow's own heartbeats notice a lost worker after a minute or two where no connection of theirs was in use. The system
that a process ran on says at once that nothing listens at its port any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec, missing_tasks, reachability, silent_tasks
from tfdist.compat import tf_cluster
from tfdist.errors import ClusterError
from tfdist.training import mismatch

_EVERY = 1.0  # seconds


@contextlib.contextmanager
def abort_on_lost_workers(cluster: ClusterSpec, task: TaskSpec) -> Iterator[None]:
    """Ends the collectives of what is inside when a worker has ended, and says when one does not answer.

    The chief asks all others, and the others ask the chief, which ends when it has missed one. One that does not answer may be
    stopped for a while: TensorFlow decides when it is given up, after some two minutes.

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
            ended = {task for task, reason in absent.items() if reason in reachability.ENDED}
            silent.note(absent.keys() - ended)
            if ended & before and not done.is_set():  # twice: the network may have hesitated
                tf_cluster.abort_collectives(tf.errors.UNAVAILABLE, "A worker has ended.")
                return
            before = ended

    threading.Thread(target=watch, daemon=True, name="tfdist-peers").start()
    try:
        yield
    except tf.errors.OpError as e:
        if sentence := mismatch.explain_mismatch(cluster, task, e):
            raise ClusterError(sentence) from e
        if not (ended := _ended_tasks(cluster, others)):
            if sentence := silent.sentence():
                raise ClusterError(
                    f"{sentence} Start all tasks again, to go on from the last backup if there is one."
                ) from e
            raise
        raise ClusterError(
            f"{missing_tasks.format_tasks(cluster, ended)} has ended while {task} trained with it; see its log for the cause. Start all "
            "tasks again, to go on from the last backup if there is one."
        ) from e
    finally:
        done.set()


def _ended_tasks(cluster: ClusterSpec, tasks: Sequence[TaskSpec]) -> dict[TaskSpec, str]:
    """Returns those of the tasks whose processes have ended, and how that shows."""
    absent = reachability.unreachable_tasks(cluster, tasks, serving=True)
    return {task: reason for task, reason in absent.items() if reason in reachability.ENDED}
