"""The chief's watch for workers and servers that no longer answer, in threads, because the main thread may wait for such a task.

TensorFlow notices a process that ends. If a process is stopped or its host vanishes, the connection stays open, and
a call to the process waits without limit. The watch gives such a worker up after some seconds: the chief shuts down its own
connections to the worker, and the call fails as if the process had been killed. TensorFlow counts the worker as lost until it
answers again. If the watch gives up a server, the job ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

from tfdist.cluster import ClusterSpec, TaskSpec, greeting, reachability
from tfdist.cluster.spec import split_address
from tfdist.compat import tf_cluster
from tfdist.parameter_server import server
from tfdist.runtime.end import hooks, process_end
from tfdist.runtime.log import logger
from tfdist.runtime.report import stacks
from tfdist.runtime.report.phase import main as phases
from tfdist.runtime.report.task_report import TIMEOUT_SECONDS, Reporter

_ASK_EVERY = 1.0  # seconds
WARN_AFTER = 60.0  # seconds of a wait for data or for a step
# Seconds without an answer after which a worker is given up: several checks have failed by then.
WORKER_TIMEOUT = 25.0
LAST_ROUND = 5.0  # seconds that the last check of a server may take
# Interval in seconds: TensorFlow reconnects repeatedly, and a call on a new connection waits until the next shutdown.
_SHUT_DOWN_EVERY = 0.1
_TCP_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_REMOTE_COLUMN = 2
_INODE_COLUMN = 9
Endpoint = tuple[str, int]  # address and port


class Watch:
    """A thread that checks workers and servers until the process ends. Gives a server up after `server_timeout` s, at least 10, without an answer.

    It also ends the process if the chief waits for its own data for longer than `timeout_seconds`, or does nothing meanwhile.

    Attributes:
        hung: Workers whose step has taken longer than the limit: the shutdown does not wait for them.
        silent_at: When tasks last did not answer, by `time.monotonic`.
        given_up: The tasks that are given up, with the reasons. A worker is removed when it answers again.
    """

    def __init__(self, cluster: ClusterSpec, server_timeout: float, timeout_seconds: float | None = None):
        self._timeout_seconds = TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        self._reporter = Reporter()
        self._warned = 0.0  # seconds of the current wait at the last warning
        self._unanswered_at = 0.0  # when a task that was not given up yet last did not answer, by `time.monotonic`
        self.hung: set[TaskSpec] = set()
        self.silent_at: dict[TaskSpec, float] = {}
        self._cluster = cluster
        self._limits = {"worker": WORKER_TIMEOUT, "ps": max(server_timeout - LAST_ROUND, reachability.REPORT_EVERY)}
        self._tasks = [task for task in cluster.tasks() if task.type in self._limits]
        self._silent = reachability.SilentTasks(cluster, cluster.chief)
        self.given_up: dict[TaskSpec, str] = {}
        # Without it these threads would wait for the lock that a waiting call holds.
        self._lender = tf_cluster.lock_lender().start()
        hooks.at_end(hooks.Stage.CONNECTIONS, self._leave)
        threading.Thread(target=self._watch, daemon=True, name="tfdist-watch").start()
        threading.Thread(target=self._shut_down, daemon=True, name="tfdist-shut-down").start()

    @property
    def lost_servers(self) -> dict[TaskSpec, str]:
        """The servers that are given up, with the reason."""
        return {task: reason for task, reason in self.given_up.items() if task.type == "ps"}

    def _end_long_wait(self) -> None:
        """Warns of a long wait of the main thread for its data, and ends the process at its limit: nothing else can end that wait."""
        report = self._reporter.report(WARN_AFTER)
        if report.state != "data":
            return
        words = f"{self._cluster.chief} {report.describe()}, for {report.waited:.0f} s now"
        # TensorFlow reads a batch after the calls in flight have ended, so a wait beside a silent task is no wait for data.
        overrun = report.overrun(min(report.waited, time.monotonic() - self._unanswered_at), self._timeout_seconds)
        if overrun:
            stacks.dump(words)
            logger.error(
                f"{words}. {overrun}. If this work is only slow, raise Trainer(timeout_seconds={self._timeout_seconds:g}). Start the "
                "training again, to resume from its last backup."
            )
            process_end.exit_code = 1
            server.publish_exit_code(self._cluster)
            process_end.end(1)
        if report.waited < WARN_AFTER:
            self._warned = 0.0
        elif report.waited > 2 * self._warned:
            self._warned = report.waited
            logger.warning(f"{words}; the job goes on")

    def _watch(self) -> None:
        while True:
            time.sleep(_ASK_EVERY)
            absent = reachability.unreachable_tasks(self._cluster, self._tasks, serving=True)
            self._silent.note({task for task, reason in absent.items() if reason not in reachability.ENDED})
            self.silent_at |= dict.fromkeys(self._silent.seconds, time.monotonic())
            now = {}
            for task, seconds in self._silent.seconds.items():
                if seconds < self._limits[task.type]:
                    continue
                now[task] = f"no answer for {seconds:.0f} s"
                if task.type == "worker" and task not in self.given_up:
                    logger.warning(
                        f"{task} at {self._cluster.address(task)} is given up after {seconds:.0f} s "
                        "without an answer, until it answers again"
                    )
            if any(task not in self.given_up for task in self._silent.seconds):
                self._unanswered_at = time.monotonic()
            self.given_up = {**now, **self.lost_servers}
            if phases.now.name == "data":
                self._end_long_wait()

    def _shut_down(self) -> None:
        endpoints = {task: resolve_endpoints(self._cluster.address(task)) for task in self._tasks}
        before: set[TaskSpec] = set()
        while True:
            time.sleep(_SHUT_DOWN_EVERY)
            now = set(self.given_up)
            for task in now - before:  # the name may resolve to another address by now
                endpoints[task] |= resolve_endpoints(self._cluster.address(task))
            before = now
            for task in now:
                shut_down_connections(endpoints[task])

    def _leave(self) -> None:
        """Ends the process at once if a task does not answer: TensorFlow's shutdown would wait for the task without limit."""
        if self.given_up or self.hung or any(map(self._is_silent, self._tasks)):
            server.publish_exit_code(self._cluster)
            logging.shutdown()
            process_end.end(process_end.expected_exit_code())

    def _is_silent(self, task: TaskSpec) -> bool:
        greeted = greeting.encode_greeting(self._cluster, task)
        reason = reachability.unreachable_reason(self._cluster.address(task), expected=greeted, serving=True)
        return bool(reason) and reason not in reachability.ENDED


def resolve_endpoints(address: str) -> set[Endpoint]:
    """Returns the addresses and ports to which `host:port` resolves; empty if the name does not resolve now."""
    host, port = split_address(address)
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    hosts = [str(entry[4][0]).partition("%")[0] for entry in entries]  # without the interface of a link-local address
    return {(_format_ip(ipaddress.ip_address(host)), port) for host in hosts}


def shut_down_connections(endpoints: set[Endpoint]) -> int:
    """Shuts down this process's TCP connections to `endpoints`, also those in progress. Returns the number of connections.

    Returns 0 on systems other than Linux, which have no `/proc/self/net`.
    """
    inodes = {inode for remote, inode in _list_connections() if remote in endpoints}
    if not inodes:
        return 0
    count = 0
    for path in pathlib.Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed in the meantime
            if os.readlink(path).removeprefix("socket:[").removesuffix("]") in inodes:
                # Use a copy: the descriptor belongs to TensorFlow, which may close it at any moment.
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    # The number may belong to another connection by now.
                    if str(os.fstat(connection.fileno()).st_ino) in inodes:
                        connection.shutdown(socket.SHUT_RDWR)
                        count += 1
    return count


def _list_connections() -> Iterator[tuple[Endpoint, str]]:
    for table in _TCP_TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines, "")
            for line in lines:
                columns = line.split()
                host, port = columns[_REMOTE_COLUMN].split(":")
                yield (_decode_ip(host), int(port, 16)), columns[_INODE_COLUMN]


def _decode_ip(digits: str) -> str:
    """Returns the address that the system prints as hexadecimal words of 32 bits in the processor's byte order."""
    words = (int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8))
    return _format_ip(ipaddress.ip_address(b"".join(words)))


def _format_ip(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Returns the text of an address; for an IPv4-mapped IPv6 address, the IPv4 address."""
    return str(getattr(address, "ipv4_mapped", None) or address)
