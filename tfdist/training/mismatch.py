"""What each worker was doing when their collectives did not match."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
import traceback
import types
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.collectives.calls import abort_collectives
from tfdist.compat import call_stack, tf_cluster
from tfdist.replicas.batch_splitting import ENDED_EARLY
from tfdist.step.execution import Execution

_MISMATCH = re.compile(r"Collective instance \d+ expected|Shape mismatch in the collective instance")
_LISTED = 8  # tasks whose calls are listed: a cluster may have thousands
_SECONDS = 10.0  # for which the other workers' calls are waited for
_PACKAGE = "tfdist.training."
_CALLS = {
    ("loops", "fit"): "fit",
    ("loops", "evaluate"): "evaluate",
    ("loops", "predict"): "predict",
    ("saving", "save"): "save",
    ("trainer", "delete_backup"): "delete_backup",
    ("consistency", "check_consistency"): "the comparison of its arguments",
    ("callback_sync", "wrap_callbacks"): "the comparison of its callbacks",
}


def explain_mismatch(cluster: ClusterSpec, task: TaskSpec, error: tf.errors.OpError) -> str:
    """Returns what the workers did that does not go together, or an empty text if that is not what `error` says.

    On the worker whose data have ended it ends the collectives of the others, which then call this, too.

    Args:
        cluster: The cluster.
        task: This process's task.
        error: What TensorFlow raised in a collective, or in a step without data.
    """
    call, ended = _describe_call(error), ENDED_EARLY in error.message
    if not ended and not _MISMATCH.search(error.message):
        return ""
    if ended and isinstance(error, tf.errors.InvalidArgumentError):  # here, and not what another worker has sent
        abort_collectives(tf.errors.ABORTED, ENDED_EARLY)
        call += ", without data left"
    calls = "; ".join(f"{each} was in {call}" for each, call in _exchange(cluster, task, call))
    if ended:
        return (
            f"A dataset has fewer batches on some workers than on others ({calls}). Give all workers the same dataset, of which each "
            "trains on its share; or give a function (tf.distribute.InputContext) -> tf.data.Dataset, whose datasets may differ in "
            "length."
        )
    return (
        f"Workers did different things at once: {calls}. All must make the same calls in the same order, with data of the same "
        "length, and so must their callbacks: one that evaluates, predicts or saves must be given to all workers."
    )


def _describe_call(error: BaseException) -> str:
    """Returns the calls of the trainer and of callbacks that an error came through, from the outside in."""
    around = [frame for frame, _ in traceback.walk_stack(None)][::-1]
    inside = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    labels = itertools.chain.from_iterable(map(_labels, [*around, *inside]))
    return ", ".join(dict.fromkeys(labels)) or "a collective of the program's own"


def _labels(frame: types.FrameType) -> Iterator[str]:
    module, name, own = call_stack.frame_call(frame)
    if module.startswith(_PACKAGE) and (call := _CALLS.get((module.removeprefix(_PACKAGE), name))):
        yield call
    elif isinstance(own, Execution) and name == "__call__":
        yield f"a step ({own.step_name})"
    elif isinstance(own, keras.callbacks.Callback) and name.startswith("on_"):
        yield f"{'the trainer' if type(own).__module__.startswith(_PACKAGE) else type(own).__name__}'s {name}"


def _exchange(cluster: ClusterSpec, task: TaskSpec, mine: str) -> Iterator[tuple[TaskSpec, str]]:
    """Yields what tasks were doing, by TensorFlow's coordination service, of those that say it in time."""
    key = "tfdist/call/{}".format
    with contextlib.suppress(tf.errors.OpError):
        tf_cluster.publish(key(task), mine)
    deadline = time.monotonic() + _SECONDS
    tasks = cluster.training_tasks()
    for each in sorted({task, *tasks[:_LISTED]}, key=tasks.index):
        call = mine if each == task else "a call that it did not tell"
        if each != task:
            with contextlib.suppress(tf.errors.OpError):
                call = tf_cluster.published(key(each), max(1, int(1000 * (deadline - time.monotonic()))))
        yield each, call
    with contextlib.suppress(
        tf.errors.OpError
    ):  # the chief, which holds what is published, must not end before all have read it
        tf_cluster.wait_at_barrier("tfdist/call", max(2000, int(1000 * (deadline - time.monotonic()))))
