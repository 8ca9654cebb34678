"""The line in which each host's launcher publishes its state, and the poll of the other launchers' lines. No TensorFlow here.

A launcher listens at one port of its host. To every peer that connects it sends one line, and closes the connection, as a task does
before the start (`cluster/greeting.py`). It reads nothing from its peers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfdist.cluster import greeting
from tfdist.cluster.spec import split_address
from tfdist.errors import truncate

POLL_SECONDS = 0.5  # between two polls of a launcher while the tasks run
POLL_SECONDS_WAITING = 0.1  # while a launcher waits for others
ANSWER_SECONDS = 2.0  # limit of one poll, after the name is resolved
_EXPIRES = 5.0  # seconds after which an answer does not count: the system may take arbitrarily long to resolve a name
_MAX_BYTES = 65536  # of a line
_UNRESOLVED = "its name is not resolved yet"
_PREFIX = "tfdist-launch "
# Any program may listen at a launcher's address, so only lines of this form are read.
_LINE = re.compile(
    _PREFIX + r"hosts=(?P<hosts>[0-9a-f]{16}) options=(?P<options>[0-9a-f]{16}) host=(?P<host>[0-9]{1,5}) "
    r"launcher=(?P<launcher>[0-9a-f]{16}) state=(?P<state>ready|waiting|training|failed|ended|done) "
    r"leader=(?P<leader>[0-9a-f]{16}|-) round=(?P<round>[0-9]{1,9}) members=(?P<members>[0-9]{1,5}:[0-9a-f]{16}(?:,[0-9]{1,5}:[0-9a-f]{16})*|-) "
    r"code=(?P<code>-?[0-9]{1,3}) restarts=(?P<restarts>[0-9]{1,9}) saved=(?P<saved>[0-9]{1,18}|-) over=(?P<over>[01]) why=(?P<why>.*)"
)


def launcher_address(address: str) -> str:
    """Returns the address of a host's launcher: the port before that of the host's first task.

    Args:
        address: The `host:port` of the first task.

    Examples:
        >>> launcher_address("host1:2222")
        'host1:2221'
    """
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - 1}"


@dataclasses.dataclass(frozen=True)
class Line:
    """The published state of a launcher.

    Attributes:
        hosts: Checksum of the list of hosts.
        options: Checksum of the options that must be equal on all hosts.
        host: Index of the launcher's host in the list.
        launcher: A random identifier of the launcher's process.
        state: `waiting`, `training` or `done` on the leader; `ready`, `training`, `failed` or `ended` on other launchers.
        leader: The identifier of the leader whose round this launcher knows, or an empty text.
        round: The number of that round; 0 before the first.
        members: Host and launcher of each member of the round; in the leader's line only.
        code: The exit code of a launcher that has `ended`, or of the job.
        restarts: Restarts of the job so far; in the leader's line only.
        saved: The step of the last backup, or None if unknown.
        over: Whether this launcher has read that the job is done.
        why: The reason for the state, in one printable line.
    """

    hosts: str
    options: str
    host: int
    launcher: str
    state: str
    leader: str = ""
    round: int = 0
    members: tuple[tuple[int, str], ...] = ()
    code: int = 0
    restarts: int = 0
    saved: int | None = None
    over: bool = False
    why: str = ""

    def encode(self) -> bytes:
        """Returns the line as it is sent."""
        members = ",".join(f"{host}:{launcher}" for host, launcher in self.members) or "-"
        saved = "-" if self.saved is None else self.saved
        return (
            f"{_PREFIX}hosts={self.hosts} options={self.options} host={self.host} launcher={self.launcher} state={self.state} "
            f"leader={self.leader or '-'} round={self.round} members={members} code={self.code} restarts={self.restarts} "
            f"saved={saved} over={self.over:d} why={truncate(self.why)}\n"
        ).encode(errors="replace")


def decode_line(received: bytes) -> Line | None:
    """Returns the line of a launcher, or None if another program has sent the bytes."""
    text = received.partition(b"\n")[0].decode(errors="replace")
    if not (found := _LINE.fullmatch(text)):
        return None
    members = [] if found["members"] == "-" else [each.split(":") for each in found["members"].split(",")]
    return Line(
        hosts=found["hosts"],
        options=found["options"],
        host=int(found["host"]),
        launcher=found["launcher"],
        state=found["state"],
        leader=found["leader"].strip("-"),
        round=int(found["round"]),
        members=tuple((int(host), launcher) for host, launcher in members),
        code=int(found["code"]),
        restarts=int(found["restarts"]),
        saved=None if found["saved"] == "-" else int(found["saved"]),
        over=found["over"] == "1",
        why=truncate(found["why"]),
    )


class LineServer:
    """Server that sends the current line to every peer that connects. It never waits for a peer.

    Args:
        address: The launcher's `host:port`. The server listens at this port of all addresses of the host.
        name: The launcher's name in an error.
        line: Returns the line to send.

    Raises:
        ClusterError: The port is taken (the error names the process if the system reports it), or only root may use it.
    """

    def __init__(self, address: str, name: str, line: Callable[[], Line]):
        try:
            self._listener = greeting.listen(split_address(address)[1])
        except OSError as e:
            hint = ", such as --hosts=host0:3000,host1:3000; the launcher listens at the port before that of the first task"
            raise greeting.port_error(name, address, e, hint) from None
        self._line = line
        self._closed = False
        threading.Thread(target=self._serve, daemon=True, name="tfdist-launcher-line").start()

    def close(self) -> None:
        """Closes the port."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.1)  # closed, or no file descriptor is free
                continue
            with connection, contextlib.suppress(OSError):
                # The kernel buffers the line, so that a peer that does not read delays no other peer.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MAX_BYTES)
                connection.setblocking(False)
                connection.send(self._line().encode())


def fetch_line(address: str, seconds: float = ANSWER_SECONDS) -> tuple[Line | None, str]:
    """Returns the line of the launcher at an address; if there is no line, None and the reason.

    Args:
        address: `host:port`.
        seconds: Limit of the connection and the answer together.
    """
    ends = time.monotonic() + seconds
    received = b""
    try:
        with socket.create_connection(split_address(address), seconds) as connection:
            while b"\n" not in received and len(received) < _MAX_BYTES and (left := ends - time.monotonic()) > 0:
                connection.settimeout(left)
                if not (more := connection.recv(_MAX_BYTES)):
                    break
                received += more
    except TimeoutError:
        pass
    except UnicodeError:  # a label of the host's name is empty or too long
        return None, "not a valid host name"
    except OSError as e:
        return None, (os.strerror(e.errno) if e.errno and e.errno > 0 else e.strerror or str(e)).lower()
    if line := decode_line(received) if b"\n" in received else None:
        return line, ""
    is_cut = b"\n" not in received and len(received) < _MAX_BYTES
    is_cut = is_cut and _PREFIX.encode().startswith(received[: len(_PREFIX)])
    return None, "no answer" if is_cut else "another program answers there"


class Answer(NamedTuple):
    """Result of the last poll of a launcher.

    Attributes:
        line: The line, or None.
        reason: The reason if there is no line.
        last: The line of the last poll that had one, or None.
        at: The time of the poll.
    """

    line: Line | None
    reason: str
    last: Line | None
    at: float


class LinePoll:
    """Poll of launchers in one daemon thread each, so that a host that does not answer delays no other host.

    Args:
        addresses: The `host:port` of each launcher to poll, by host.
        on_line: Called in those threads with the host and its line.

    Attributes:
        interval: Seconds between two polls of a launcher.
    """

    def __init__(self, addresses: Mapping[int, str], on_line: Callable[[int, Line], object] = lambda host, line: None):
        self._on_line = on_line
        self.interval = POLL_SECONDS_WAITING
        self._answers = dict.fromkeys(addresses, Answer(None, _UNRESOLVED, None, -math.inf))
        self._closed = threading.Event()
        for host, address in addresses.items():
            threading.Thread(target=self._poll, args=(host, address), daemon=True, name="tfdist-poll").start()

    def __getitem__(self, host: int) -> Answer:
        """Returns the last answer of a host's launcher. An answer of more than 5 s ago does not count."""
        answer = self._answers[host]
        if time.monotonic() - answer.at < _EXPIRES:
            return answer
        return answer._replace(line=None, reason=answer.reason or "no answer")

    def close(self) -> None:
        """Ends the threads. A thread that resolves a name ends after that."""
        self._closed.set()

    def _poll(self, host: int, address: str) -> None:
        while not self._closed.is_set():
            line, reason = fetch_line(address)
            if line:
                self._on_line(host, line)
            self._answers[host] = Answer(line, reason, line or self._answers[host].last, time.monotonic())
            self._closed.wait(self.interval)
