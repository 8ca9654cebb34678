"""Whether the tasks of a cluster can reach each other, asked before and beside TensorFlow, which waits in silence. No TensorFlow here.

Before TensorFlow starts its server, each task listens at its own address and says who it is to whoever asks, so that tasks may
start in any order, and one that has another cluster in mind, or is another program, is named.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from tfdist.cluster import task_versions
from tfdist.cluster.spec import ClusterSpec, TaskSpec
from tfdist.errors import ClusterError

START_TIMEOUT = 300.0  # seconds
_REPORT_EVERY = 10.0
_ANSWER = 3.0  # how long an address may take to answer
_GREETING = b"tfdist "
_LONGEST = 4096  # bytes of what a task says
_LINGER = 2.0  # seconds
WAITS_FOR_OTHERS = "is there, and waits for others"  # of a task that has not joined the cluster yet, or not again
_SETTINGS = b"\x04"  # the type of the frame that an HTTP/2 server begins with (RFC 9113, 3.4)


def unreachable_reason(
    address: str,
    timeout: float = _ANSWER,
    expected: str = "",
    serving: bool = False,
    heard: Callable[[bytes], object] = lambda line: None,
) -> str:
    """Returns why nothing can be reached at `address`, or an empty text where something listens.

    Args:
        address: `host:port`.
        timeout: Seconds to wait for an answer.
        expected: Who should be there, as `encode_greeting` says it: nobody else is looked for. Empty means anybody.
        serving: Whether it must be TensorFlow's server.
        heard: Called with what the other one says of its versions.
    """
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            return _unexpected_peer(connection, expected, serving, heard) if expected else ""
    except TimeoutError:
        return "no answer"
    except UnicodeError:  # of a name with too long a part, or an empty one
        return "no name of a host"
    except OSError as e:
        return (os.strerror(e.errno) if e.errno and e.errno > 0 else e.strerror or str(e)).lower()


def _unexpected_peer(
    connection: socket.socket, expected: str, serving: bool, heard: Callable[[bytes], object] = lambda line: None
) -> str:
    """Returns who has answered, where it is neither who was expected, nor TensorFlow's server."""
    connection.settimeout(_ANSWER)
    said = b""
    with contextlib.suppress(TimeoutError):
        said = connection.recv(200)
        while said.startswith(_GREETING) and said.count(b"\n") < 2 and len(said) < _LONGEST:
            if not (more := connection.recv(_LONGEST)):
                break
            said += more
    if said[3:4] == _SETTINGS:  # TensorFlow's server speaks first, too
        return ""
    if not said.startswith(_GREETING):
        return "another program answers there"
    first, _, second = said.partition(b"\n")
    found = first.decode(errors="replace").strip()
    if found == expected:
        heard(second)
        return WAITS_FOR_OTHERS if serving else ""
    (_, mine, name), (_, other, task) = expected.split(" ", 2), [*found.split(" ", 2), "", ""][:3]
    return (
        f"{task} answers there, not {name}"
        if mine == other
        else f"{task} of a cluster with other addresses answers there"
    )


def encode_greeting(cluster: ClusterSpec, task: TaskSpec) -> str:
    """Returns what a task says of itself: which cluster it knows, and who it is in it."""
    return f"tfdist {hashlib.sha256(repr(cluster).encode()).hexdigest()[:16]} {task}"


def unreachable_tasks(cluster: ClusterSpec, tasks: Iterable[TaskSpec], serving: bool = False) -> dict[TaskSpec, str]:
    """Returns those of `tasks` at whose addresses nothing listens, and why; the system answers for a process that is busy.

    Args:
        cluster: The cluster.
        tasks: Whom to ask.
        serving: Whether it must be their TensorFlow servers that listen; one that is busy may not answer.
    """

    def why_not(task: TaskSpec, seconds: float) -> str:
        return unreachable_reason(
            cluster.address(task), seconds, encode_greeting(cluster, task) if serving else "", serving
        )

    return _ReachabilityProbe(why_not).ask(tasks)


class _ReachabilityProbe:
    """Asks tasks at once, each in a thread: the system may look for a name for as long as it likes.

    Args:
        why_not: Returns why a task cannot be reached, given the seconds that its address has to answer, or an empty text.
    """

    def __init__(self, why_not: Callable[[TaskSpec, float], str]):
        self._why_not = why_not
        self._threads: dict[TaskSpec, threading.Thread] = {}
        self._reasons: dict[TaskSpec, str] = {}

    def ask(self, tasks: Iterable[TaskSpec], seconds: float = _ANSWER) -> dict[TaskSpec, str]:
        """Returns the reasons of those that cannot be reached; those of the round before may still be under way."""
        tasks = list(tasks)
        for task in tasks:
            if task not in self._threads:
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
        self._reasons[task] = self._why_not(task, seconds)


def format_tasks(cluster: ClusterSpec, absent: dict[TaskSpec, str]) -> str:
    """Returns `worker:1 at host:2222 (connection refused), ...`."""
    return ", ".join(f"{task} at {cluster.address(task)} ({reason})" for task, reason in absent.items())


def wait_until_reachable(
    cluster: ClusterSpec,
    tasks: Iterable[TaskSpec],
    timeout: float = START_TIMEOUT,
    serving: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all tasks can be reached, and says every 10 s for which it waits.

    Args:
        cluster: Their addresses.
        tasks: The tasks.
        timeout: Seconds to wait.
        serving: Whether for TensorFlow's servers, not for tasks that wait themselves.
        clock: Returns seconds. Injected, as `sleep`, so that tests need not wait.
        sleep: Waits some seconds.

    Raises:
        ClusterError: Some task cannot be reached after `timeout`, or runs other versions or another configuration.
    """
    started = reported = now = clock()
    said: dict[str, dict[str, str]] = {}

    def why_not(task: TaskSpec, seconds: float) -> str:
        def heard(line: bytes) -> None:
            said[f"{task} at {cluster.address(task)}"] = task_versions.decode(line)

        return unreachable_reason(cluster.address(task), seconds, encode_greeting(cluster, task), serving, heard)

    inquiry = _ReachabilityProbe(why_not)
    while absent := inquiry.ask(tasks, min(_ANSWER, max(0.1, started + timeout - now))):
        now = clock()
        if now - started >= timeout:
            raise ClusterError(
                f"Waited {timeout:.0f} s for {format_tasks(cluster, absent)}. Is it started, and is its port open to this "
                f"host?{_loopback_hint(cluster)}"
            )
        if now - reported >= _REPORT_EVERY:
            for each, reason in absent.items():
                print(f"tfdist: waiting for {format_tasks(cluster, {each: reason})}", flush=True)
            reported = now
        tasks = list(absent)
        sleep(0.05 if now - started < 1 else 0.2)
    different = list(task_versions.differences(said))
    for _, sentence in different:
        print(f"tfdist: {sentence}", file=sys.stderr, flush=True)
    if faults := [sentence for is_fault, sentence in different if is_fault]:
        sleep(_LINGER)  # so that the others hear it, too
        raise ClusterError(
            f"The tasks do not run the same: {'; '.join(faults)}. Give all the same versions and the same configuration."
        )


def _loopback_hint(cluster: ClusterSpec) -> str:
    """Returns a hint where all addresses are such that each host has for itself, or an empty text."""
    for task in cluster.tasks():
        host = cluster.address(task).rsplit(":", 1)[0].strip("[]")
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_loopback:
                continue
        if host != "localhost":
            return ""
    return f" Every host means itself by {host}: for tasks of several hosts, give addresses that all of them know."


@contextlib.contextmanager
def listening_for_peers(cluster: ClusterSpec, task: TaskSpec) -> Iterator[None]:
    """Listens at the task's own address, and says who it is; afterwards the port is free for TensorFlow.

    Raises:
        ClusterError: The port cannot be had: another process, which is named where the system tells, has it, or only root may.
    """
    port = int(cluster.address(task).rsplit(":", 1)[1])
    try:
        listener = _listener(port)
    except OSError as e:
        taken = e.errno == errno.EADDRINUSE
        why = f"is taken{_owner(port)}. End that, or" if taken else f"cannot be had ({(e.strerror or str(e)).lower()});"
        raise ClusterError(
            f"{task} cannot listen at {cluster.address(task)}: port {port} {why} give the task another port."
        ) from None
    said = encode_greeting(cluster, task).encode() + b"\n" + task_versions.encode() + b"\n"

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(said)

    threading.Thread(target=answer, daemon=True, name="tfdist-preflight").start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()


def _listener(port: int) -> socket.socket:
    """Returns a socket that listens at a port of all addresses, of both families where there are two.

    Raises:
        OSError: The port cannot be had.
    """
    error = OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    for family, place in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
        except OSError as e:  # no such addresses here
            error = e
            continue
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((place, port))
            listener.listen(128)
            return listener
        except OSError as e:
            listener.close()
            error = e
            if e.errno == errno.EADDRINUSE:
                break
    raise error


def _owner(port: int) -> str:
    """Returns ` by pid 4711 (python)` where the system tells who listens at a port."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f" by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):
        pass
    return ""


def bypass_proxies(cluster: ClusterSpec) -> None:
    """Has gRPC, which heeds `http_proxy` and `https_proxy`, reach the cluster's hosts without (grpc/grpc#9989)."""
    hosts = [address.rsplit(":", 1)[0].strip("[]") for task in cluster.tasks() for address in [cluster.address(task)]]
    os.environ.setdefault("no_proxy", os.environ.get("NO_PROXY", ""))  # others look at the former first
    for name in ("no_grpc_proxy", "no_proxy"):
        known = [each for each in os.environ.get(name, "").split(",") if each]
        if name == "no_proxy" or known:  # gRPC takes no_grpc_proxy before no_proxy
            os.environ[name] = ",".join(dict.fromkeys([*known, *hosts]))


@contextlib.contextmanager
def startup_barrier(cluster: ClusterSpec, task: TaskSpec, timeout: float = START_TIMEOUT) -> Iterator[None]:
    """Waits until all tasks are there; for what is inside, TensorFlow's own wait for them, there is as much time again.

    Args:
        cluster: The cluster.
        task: This process's task.
        timeout: Seconds to wait. What is inside cannot be interrupted: if it takes longer, the process ends with a sentence and
            exit code 1.

    Raises:
        ClusterError: This task's port is taken, or other tasks are not there in time.
    """
    bypass_proxies(cluster)
    with listening_for_peers(cluster, task):
        wait_until_reachable(cluster, [other for other in cluster.tasks() if other != task], timeout)
    with startup_watchdog(cluster, task, timeout):
        yield


@contextlib.contextmanager
def startup_watchdog(cluster: ClusterSpec, task: TaskSpec, timeout: float) -> Iterator[None]:
    """Says every 10 s whom TensorFlow waits for inside, and ends the process if it does not come back in time.

    Args:
        cluster: The cluster.
        task: This process's task.
        timeout: Seconds.
    """
    others = [other for other in cluster.tasks() if other != task]
    ends = time.monotonic() + timeout
    done = threading.Event()

    def watch() -> None:
        while not done.wait(min(_REPORT_EVERY, max(0.0, ends - time.monotonic()))):
            absent = (
                format_tasks(cluster, unreachable_tasks(cluster, others))
                or "others, though all can be reached: see their logs"
            )
            over = time.monotonic() >= ends
            if done.is_set():  # while the others were asked
                return
            waits = f"has waited {timeout:.0f} s, and is ended," if over else "waits"
            print(f"tfdist: {task}: TensorFlow {waits} for {absent}", file=sys.stderr, flush=True)
            if over:
                os._exit(1)

    threading.Thread(target=watch, daemon=True, name="tfdist-start").start()
    try:
        yield
    finally:
        done.set()
