"""Which tasks have finished their programs: each publishes it before it exits, because its port alone does not show why it closes."""

from __future__ import annotations

from tfdist.cluster import TaskSpec
from tfdist.compat import tf_cluster

_READ_WITHIN = 0.01  # seconds: the text is there, or the task runs
_key = "tfdist/finished/{}".format


def publish(task: TaskSpec) -> None:
    """Publishes that this process, `task`, exits with code 0."""
    tf_cluster.try_publish(_key(task), "0")


def is_published(task: TaskSpec) -> bool:
    """Returns whether a task has published that it exits with code 0; False if the chief, which holds the texts, has ended."""
    return bool(tf_cluster.find_published(_key(task), _READ_WITHIN))
