"""The chief's watch over workers and servers that no longer answer, while its main thread may wait for one of them.

TensorFlow notices a process that ends. If a process is stopped or its host vanishes, the connection stays as it was, and
a call to it waits without limit. Here such a worker is given up after a while: the chief shuts down its own connections to
it, the call fails as if the process had been killed, and TensorFlow counts the worker as lost until it answers again. A
server that is given up ends the job.
"""

from __future__ import annotations

import atexit
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
from tfdist.runtime import process_end
from tfdist.runtime.log import logger

_ASK_EVERY = 1.0  # seconds
# Seconds without an answer after which a worker is given up: several questions have gone without one by then.
WORKER_TIMEOUT = 25.0
_LAST_ROUND = 5.0  # seconds that the last question to a server may take
# TensorFlow connects again and again; a call that has found a new connection waits for so many seconds.
_SHUT_DOWN_EVERY = 0.1
_TCP_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_REMOTE_COLUMN, _INODE_COLUMN = 2, 9
Endpoint = tuple[str, int]  # address and port


class Watch:
    """Asks workers and servers, in a thread, until the process ends; gives a server up after `server_timeout` s, at least 10, without an answer.

    Attributes:
        given_up: The tasks that are given up, with the reason: workers until they answer again.
    """

    def __init__(self, cluster: ClusterSpec, server_timeout: float):
        self._cluster = cluster
        self._limits = {"worker": WORKER_TIMEOUT, "ps": max(server_timeout - _LAST_ROUND, reachability.REPORT_EVERY)}
        self._tasks = [task for task in cluster.tasks() if task.type in self._limits]
        self._silent = reachability.SilentTasks(cluster, cluster.chief)
        self.given_up: dict[TaskSpec, str] = {}
        self._lender = tf_cluster.lock_lender().start()  # or these threads would wait with the call
        atexit.register(self._leave)
        threading.Thread(target=self._watch, daemon=True, name="tfdist-watch").start()
        threading.Thread(target=self._shut_down, daemon=True, name="tfdist-shut-down").start()

    @property
    def lost_servers(self) -> dict[TaskSpec, str]:
        """The servers that are given up, with the reason."""
        return {task: reason for task, reason in self.given_up.items() if task.type == "ps"}

    def _watch(self) -> None:
        while True:
            time.sleep(_ASK_EVERY)
            absent = reachability.unreachable_tasks(self._cluster, self._tasks, serving=True)
            self._silent.note({task for task, reason in absent.items() if reason not in reachability.ENDED})
            now = {
                task: f"no answer for {seconds:.0f} s"
                for task, seconds in self._silent.seconds.items()
                if seconds >= self._limits[task.type]
            }
            for task in now.keys() - self.given_up.keys():
                if task.type == "worker":
                    logger.warning(
                        f"{task} at {self._cluster.address(task)} is given up after {self._silent.seconds[task]:.0f} s "
                        "without an answer, until it answers again"
                    )
            self.given_up = {**now, **self.lost_servers}

    def _shut_down(self) -> None:
        endpoints = {task: resolve_endpoints(self._cluster.address(task)) for task in self._tasks}
        before: set[TaskSpec] = set()
        while True:
            time.sleep(_SHUT_DOWN_EVERY)
            now = set(self.given_up)
            for task in now - before:  # its name may stand for another address by now
                endpoints[task] |= resolve_endpoints(self._cluster.address(task))
            before = now
            for task in now:
                shut_down_connections(endpoints[task])

    def _leave(self) -> None:
        """Ends the process at once if a task does not answer: TensorFlow's shutdown would wait for it without limit."""
        if self.given_up or any(map(self._is_silent, self._tasks)):
            server.publish_exit_code(self._cluster)
            logging.shutdown()
            process_end.end(process_end.expected_exit_code())

    def _is_silent(self, task: TaskSpec) -> bool:
        greeted = greeting.encode_greeting(self._cluster, task)
        reason = reachability.unreachable_reason(self._cluster.address(task), expected=greeted, serving=True)
        return bool(reason) and reason not in reachability.ENDED


def resolve_endpoints(address: str) -> set[Endpoint]:
    """Returns the addresses and ports that `host:port` stands for; none where the name is not known now."""
    host, port = split_address(address)
    with contextlib.suppress(OSError, UnicodeError):
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return {(_format_ip(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])), port) for entry in entries}
    return set()


def shut_down_connections(endpoints: set[Endpoint]) -> int:
    """Shuts down this process's TCP connections to `endpoints`, also those that are being made. Returns how many there were.

    It returns 0 on systems without `/proc/self/net`, which are not Linux.
    """
    inodes = {inode for remote, inode in _list_connections() if remote in endpoints}
    count = 0
    for path in pathlib.Path("/proc/self/fd").glob("*") if inodes else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(path).removeprefix("socket:[").removesuffix("]") in inodes:
                # A copy: the descriptor belongs to TensorFlow, which may close it at any moment.
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    if str(os.fstat(connection.fileno()).st_ino) in inodes:  # not another one by now
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
    """Returns the address that the system writes as words of 32 bits, in the processor's order of bytes."""
    words = (int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8))
    return _format_ip(ipaddress.ip_address(b"".join(words)))


def _format_ip(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Returns the text of an address; of an IPv4 address on a socket of IPv6, the IPv4 address."""
    return str(getattr(address, "ipv4_mapped", None) or address)
