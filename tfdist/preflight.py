"""Whether the tasks of a cluster can be reached, asked before and beside TensorFlow, which waits in silence. No TensorFlow here."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable

from tfdist.cluster import ClusterSpec, TaskSpec
from tfdist.errors import ClusterError

START_TIMEOUT = 300.0  # seconds
_REPORT_EVERY = 10.0


def unreachable(address: str, timeout: float = 3.0) -> str:
    """Returns why nothing can be reached at `address`, or an empty text where something listens.

    Args:
        address: `host:port`.
        timeout: Seconds to wait for an answer.
    """
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout):
            return ""
    except TimeoutError:
        return "no answer"
    except OSError as e:
        return (os.strerror(e.errno) if e.errno and e.errno > 0 else e.strerror or str(e)).lower()


def missing(cluster: ClusterSpec, tasks: Iterable[TaskSpec]) -> dict[TaskSpec, str]:
    """Returns those of `tasks` that cannot be reached, and why."""
    reasons = {task: unreachable(cluster.address(task)) for task in tasks}
    return {task: reason for task, reason in reasons.items() if reason}


def describe(cluster: ClusterSpec, absent: dict[TaskSpec, str]) -> str:
    """Returns `worker:1 at host:2222 (connection refused), ...`."""
    return ", ".join(f"{task} at {cluster.address(task)} ({reason})" for task, reason in absent.items())


def wait_for(
    cluster: ClusterSpec,
    tasks: Iterable[TaskSpec],
    timeout: float = START_TIMEOUT,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all tasks can be reached, and says every 10 s for which it waits.

    Args:
        cluster: Their addresses.
        tasks: The tasks.
        timeout: Seconds to wait.
        clock: Returns seconds. Injected, as `sleep`, so that tests need not wait.
        sleep: Waits some seconds.

    Raises:
        ClusterError: Some task cannot be reached after `timeout`.
    """
    started = reported = clock()
    while absent := missing(cluster, tasks):
        now = clock()
        if now - started > timeout:
            raise ClusterError(
                f"Waited {timeout:.0f} s for {describe(cluster, absent)}. Is it started, and is its port open to this host?"
            )
        if now - reported >= _REPORT_EVERY:
            print(f"tfdist: waiting for {describe(cluster, absent)}", flush=True)
            reported = now
        tasks = list(absent)
        sleep(0.2)
