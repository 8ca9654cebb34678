"""Probes of a cluster's tasks. They report tasks that do not answer, addresses at which another program answers, and the reasons.

No TensorFlow here.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable

from tfdist.cluster import greeting
from tfdist.cluster.spec import ClusterSpec, TaskSpec, split_address
from tfdist.cluster.validation import is_each_hosts_own
from tfdist.runtime.log import logger

ANSWER_TIMEOUT = 3.0  # seconds that an address has to answer
SETTLED = 5.0  # seconds within which the kernel closes the port of a killed process; it closes the connections first
# The reason for a task that has not joined the cluster, or not rejoined it.
WAITS_FOR_OTHERS = "is there, and waits for others"
# The reasons for a process that has ended, and for its successor at the same address. A busy process has other reasons, or none.
ENDED = ("connection refused", WAITS_FOR_OTHERS)
# The frame that an HTTP/2 server begins with (RFC 9113, 3.4): its length, type 4, no flags, stream 0; then settings of 6 bytes.
_SETTINGS = re.compile(rb"\0[\0-\x03][\0-\xff]\x04\0\0\0\0\0", re.DOTALL)
# Any program may listen at an address, so messages contain only the task's name of a greeting of this form.
_GREETING = re.compile(r"tfdist [0-9a-f]+ [a-z]+:[0-9]{1,9}")
REPORT_AFTER = 5.0  # seconds without an answer, after which it is logged
REPORT_EVERY = 10.0  # seconds until it is logged again
_LONGEST_ROUND = 5.0  # limit of the seconds counted per round, because this process itself may have been stopped


def unreachable_tasks(cluster: ClusterSpec, tasks: Iterable[TaskSpec], serving: bool = False) -> dict[TaskSpec, str]:
    """Returns the tasks at whose addresses nothing listens, and the reasons. The kernel accepts connections for a busy process.

    With `serving`, their TensorFlow servers must listen; a busy server may not answer.
    """

    def probe_task(task: TaskSpec, seconds: float) -> str:
        expected = greeting.encode_greeting(cluster, task) if serving else ""
        return unreachable_reason(cluster.address(task), seconds, expected, serving)

    return ReachabilityProbe(probe_task).ask(tasks)


class ReachabilityProbe:
    """Probe that connects to each task in its own thread, because the system may take arbitrarily long to resolve a name.

    `probe_task(task, seconds)` returns why a task cannot be reached, or an empty text.
    """

    def __init__(self, probe_task: Callable[[TaskSpec, float], str]):
        self._probe_task = probe_task
        self._threads: dict[TaskSpec, threading.Thread] = {}
        self._reasons: dict[TaskSpec, str] = {}

    def ask(self, tasks: Iterable[TaskSpec], seconds: float = ANSWER_TIMEOUT) -> dict[TaskSpec, str]:
        """Returns why tasks cannot be reached. A connection of the previous round may still be under way."""
        tasks = list(tasks)
        for task in tasks:
            if task not in self._threads:
                # Until this probe ends, the previous round's reason counts: on a busy machine a probe may take long.
                if not self._reasons.get(task):
                    self._reasons[task] = "its name is not resolved yet"
                self._threads[task] = threading.Thread(target=self._ask, args=(task, seconds), daemon=True)
                self._threads[task].start()
        ends = time.monotonic() + seconds + 0.5
        for task in tasks:
            self._threads[task].join(max(0.0, ends - time.monotonic()))
            if not self._threads[task].is_alive():
                del self._threads[task]
        return {task: self._reasons[task] for task in tasks if self._reasons[task]}

    def _ask(self, task: TaskSpec, seconds: float) -> None:
        self._reasons[task] = self._probe_task(task, seconds)


def unreachable_reason(
    address: str,
    timeout: float = ANSWER_TIMEOUT,
    expected: str = "",
    serving: bool = False,
    on_versions: Callable[[bytes], object] = lambda line: None,
) -> str:
    """Returns why the expected process cannot be reached at `address`, or an empty text if it can.

    Args:
        expected: The greeting of the task that should answer (`greeting.encode_greeting`). Empty accepts any process that listens.
        serving: Whether TensorFlow's server must answer; the task's greeting is then not enough.
        on_versions: Called with the line in which the other task sends its versions.
    """
    try:
        with socket.create_connection(split_address(address), timeout) as connection:
            return _unexpected_peer(connection, expected, serving, on_versions) if expected else ""
    except TimeoutError:
        return "no answer"
    except UnicodeError:  # a label of the host's name is empty or too long
        return "not a valid host name"
    except OSError as e:
        # A name that cannot be resolved has a negative number, of which only the error itself has the text.
        reason = os.strerror(e.errno) if e.errno and e.errno > 0 else e.strerror
        return (reason or str(e)).lower()


def _unexpected_peer(
    connection: socket.socket, expected: str, serving: bool, on_versions: Callable[[bytes], object]
) -> str:
    """Returns which other task or program answers, or an empty text for the expected task or TensorFlow's server."""
    connection.settimeout(ANSWER_TIMEOUT)
    # A greeting has two lines, which may arrive in several pieces.
    received = b""
    with contextlib.suppress(TimeoutError):  # what has arrived until then tells who answers
        received = connection.recv(200)
        while received.startswith(greeting.PREFIX) and received.count(b"\n") < 2 and len(received) < greeting.MAX_BYTES:
            more = connection.recv(greeting.MAX_BYTES)
            if not more:
                break
            received += more
    if _SETTINGS.match(received):  # TensorFlow's server also sends before it receives
        return ""
    first, _, second = received.partition(b"\n")
    answer = first.decode(errors="replace").strip()
    if not _GREETING.fullmatch(answer):
        return "another program answers there"
    if answer == expected:
        on_versions(second)
        return WAITS_FOR_OTHERS if serving else ""
    _, own_cluster, name = expected.split(" ")
    _, other_cluster, task = answer.split(" ")
    if other_cluster != own_cluster:
        return f"{task} of a cluster with other addresses answers there"
    return f"{task} answers there, not {name}"


class SilentTasks:
    """Record of the tasks that do not answer, although they are not known to have ended, and of the seconds without an answer.

    Tests replace `clock`, so that they need not wait.

    Attributes:
        seconds: Seconds without an answer, by silent task.
        returned: Seconds without an answer of the tasks that answer again; the most recent first.
    """

    def __init__(self, cluster: ClusterSpec, task: TaskSpec, clock: Callable[[], float] = time.monotonic):
        self._cluster = cluster
        self._task = task
        self._clock = clock
        self.seconds: dict[TaskSpec, float] = {}
        self.returned: dict[TaskSpec, float] = {}
        self._noted = clock()
        self._logged = -REPORT_EVERY

    def note(self, silent: Iterable[TaskSpec]) -> None:
        """Records which tasks do not answer now, and logs those that have not answered for long."""
        now = self._clock()
        passed = min(now - self._noted, _LONGEST_ROUND)
        before = self.seconds
        self.seconds = {task: before.get(task, 0.0) + passed for task in silent}
        back = {
            task: seconds for task, seconds in before.items() if seconds >= REPORT_AFTER and task not in self.seconds
        }
        self.returned = back | {task: seconds for task, seconds in self.returned.items() if task not in back}
        self._noted = now
        sentence = self.sentence()
        if sentence and now - self._logged >= REPORT_EVERY:
            logger.warning(sentence)
            self._logged = now

    @property
    def long(self) -> list[TaskSpec]:
        """The tasks whose silence is long enough to report."""
        return sorted((task for task, seconds in self.seconds.items() if seconds >= REPORT_AFTER), key=str)

    def sentence(self) -> str:
        """Returns a warning with the silent tasks and the seconds without an answer, or an empty text."""
        long = self.long
        if not long:
            return ""
        names = ", ".join(f"{task} at {self._cluster.address(task)}" for task in long)
        seconds = max(self.seconds[task] for task in long)
        return (
            f"{self._task} waits for {names}: no answer for {seconds:.0f} s. Is the process stopped, its host "
            "overloaded, or the network down?"
        )


def format_tasks(cluster: ClusterSpec, absent: dict[TaskSpec, str]) -> str:
    """Returns `worker:1 at host:2222 (connection refused), ...`."""
    return ", ".join(f"{task} at {cluster.address(task)} ({reason})" for task, reason in absent.items())


def loopback_hint(cluster: ClusterSpec) -> str:
    """Returns a hint if all addresses are loopback addresses, which lead every host to itself; else an empty text."""
    hosts = [split_address(cluster.address(task))[0] for task in cluster.tasks()]
    if not all(map(is_each_hosts_own, hosts)):
        return ""
    return (
        f" {hosts[-1]} is each host's own address: for tasks on several hosts, use addresses that all hosts can reach."
    )
