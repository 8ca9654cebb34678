"""The barrier at the start of a cluster: all tasks must answer before TensorFlow waits for them without a message.

Each task first listens at its own address and sends a greeting to every peer that connects (`greeting`). So tasks may start in
any order, and an error reports an address at which another cluster's task, or another program, answers. No TensorFlow here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from tfdist.cluster import greeting, reachability, task_versions
from tfdist.cluster.spec import ClusterSpec, TaskSpec, split_address
from tfdist.errors import ClusterError
from tfdist.runtime.end import process_end
from tfdist.runtime.log import TO_STDERR, logger

START_TIMEOUT = 300.0  # seconds
_REPORT_EVERY = 10.0
# Seconds. A peer that connected too early connects again after its round of probes, which takes at most ANSWER_TIMEOUT.
_LINGER = reachability.ANSWER_TIMEOUT + 2.0


@contextlib.contextmanager
def startup_barrier(cluster: ClusterSpec, task: TaskSpec, timeout: float = START_TIMEOUT) -> Iterator[None]:
    """Waits until all tasks can be reached. Within the context, TensorFlow may wait for them for `timeout` seconds more.

    TensorFlow's wait cannot be interrupted: if it takes longer, the process prints a message and exits with code 1.

    Raises:
        ClusterError: This task's port is taken, or other tasks cannot be reached in time.
    """
    bypass_proxies(cluster)
    with greeting.listening_for_peers(cluster, task):
        wait_until_reachable(cluster, [other for other in cluster.tasks() if other != task], timeout)
    with startup_watchdog(cluster, task, timeout):
        yield


def wait_until_reachable(
    cluster: ClusterSpec,
    tasks: Iterable[TaskSpec],
    timeout: float = START_TIMEOUT,
    serving: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all tasks can be reached, and prints the missing tasks every 10 s.

    With `serving`, it waits for TensorFlow's servers; without, a task that itself still waits for others counts as reached.
    Tests replace `clock` and `sleep`, so that they need not wait.

    Raises:
        ClusterError: Some task cannot be reached after `timeout`, or runs other versions or another configuration.
    """
    started = reported = now = clock()
    versions: dict[str, dict[str, str]] = {}

    def describe(task: TaskSpec) -> str:
        return f"{task} at {cluster.address(task)}"

    def probe_task(task: TaskSpec, seconds: float) -> str:
        def on_versions(line: bytes) -> None:
            versions[describe(task)] = task_versions.decode(line)

        return reachability.unreachable_reason(
            cluster.address(task), seconds, greeting.encode_greeting(cluster, task), serving, on_versions
        )

    tasks = list(tasks)
    probe = reachability.ReachabilityProbe(probe_task)
    while True:
        left = max(0.1, started + timeout - now)
        absent = probe.ask(tasks, min(reachability.ANSWER_TIMEOUT, left))
        if not absent:
            break
        now = clock()
        if now - started >= timeout:
            raise ClusterError(
                f"Waited {timeout:.0f} s for {reachability.format_tasks(cluster, absent)}. Is it started, and is its port open to this "
                f"host?{reachability.loopback_hint(cluster)}"
            )
        if now - reported >= _REPORT_EVERY:
            for absent_task, reason in absent.items():
                logger.info(f"waiting for {reachability.format_tasks(cluster, {absent_task: reason})}")
            reported = now
        # Never probe a task again after its answer: it closes this port before it starts TensorFlow's server.
        tasks = list(absent)
        sleep(0.05 if now - started < 1 else 0.2)
    faults = []
    for is_fault, sentence in task_versions.differences(versions):
        if is_fault:
            faults.append(sentence)
        logger.log(logging.ERROR if is_fault else logging.WARNING, sentence, extra=TO_STDERR)
    if faults:
        sleep(_LINGER)  # so that the other tasks receive this task's greeting, too
        raise ClusterError(
            f"The tasks differ: {' '.join(faults)} Run all tasks with the same versions and the same configuration."
        )


@contextlib.contextmanager
def startup_watchdog(cluster: ClusterSpec, task: TaskSpec, timeout: float) -> Iterator[None]:
    """Prints every 10 s the tasks that TensorFlow, started within the context, waits for; ends the process after `timeout`.

    The code within the context must release the interpreter's lock, or lend it (`compat.tf_cluster.lock_lender`). SIGINT and SIGTERM end the process at once.

    Raises:
        ClusterError: TensorFlow's server cannot listen, because this task's port is taken.
    """
    others = [other for other in cluster.tasks() if other != task]
    ends = time.monotonic() + timeout
    done = threading.Event()

    def watch() -> None:
        while not done.wait(min(_REPORT_EVERY, max(0.0, ends - time.monotonic()))):
            unreachable = reachability.unreachable_tasks(cluster, others, serving=True)
            absent = "others, though all can be reached: see their logs. A task that restarts alone cannot join tasks that already train"
            if unreachable:
                absent = reachability.format_tasks(cluster, unreachable)
            if done.is_set():  # TensorFlow may have returned during the probes, which take seconds
                return
            if time.monotonic() < ends:
                logger.warning(f"{task}: TensorFlow waits for {absent}", extra=TO_STDERR)
                continue
            logger.error(f"{task}: TensorFlow has waited {timeout:.0f} s, and is ended, for {absent}", extra=TO_STDERR)
            process_end.end(1)  # the main thread is in TensorFlow's wait, where no exception reaches it

    threading.Thread(target=watch, daemon=True, name="tfdist-start").start()
    with process_end.signals_end_process(), greeting.naming_port_owner(cluster, task):
        try:
            yield
        finally:
            done.set()


def bypass_proxies(cluster: ClusterSpec) -> None:
    """Makes gRPC reach the cluster's hosts directly, without `http_proxy` and `https_proxy` (grpc/grpc#9989)."""
    hosts = [split_address(cluster.address(task))[0] for task in cluster.tasks()]
    os.environ.setdefault("no_proxy", os.environ.get("NO_PROXY", ""))  # other libraries look at no_proxy first
    for name in ("no_grpc_proxy", "no_proxy"):
        known = [host for host in os.environ.get(name, "").split(",") if host]
        if name == "no_proxy" or known:  # gRPC reads no_grpc_proxy before no_proxy
            os.environ[name] = ",".join(dict.fromkeys([*known, *hosts]))
