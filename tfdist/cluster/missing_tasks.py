"""The wording of messages about tasks that cannot be reached. No TensorFlow here."""

from __future__ import annotations

import contextlib
import ipaddress

from tfdist.cluster.spec import ClusterSpec, TaskSpec


def format_tasks(cluster: ClusterSpec, absent: dict[TaskSpec, str]) -> str:
    """Returns `worker:1 at host:2222 (connection refused), ...`."""
    return ", ".join(f"{task} at {cluster.address(task)} ({reason})" for task, reason in absent.items())


def loopback_hint(cluster: ClusterSpec) -> str:
    """Returns a hint if all addresses are loopback addresses, which every host has for itself; else an empty text."""
    for task in cluster.tasks():
        host = cluster.address(task).rsplit(":", 1)[0].strip("[]")
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_loopback:
                continue
        if host != "localhost":
            return ""
    return f" Every host means itself by {host}: for tasks of several hosts, give addresses that all of them know."
