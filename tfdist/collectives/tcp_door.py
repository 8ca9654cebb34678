"""The port at which a rank of `tcp` listens for the others, and the hello of each connection. Does not import TensorFlow."""

from __future__ import annotations

import collections
import dataclasses
import hmac
import os
import random
import re
import select
import socket
import struct
import time
from collections.abc import Sequence

from tfdist.errors import ConfigError
from tfdist.runtime.log import logger

PORTS = "TFDIST_PORTS"  # environment variable: the ports from which each rank takes one, as 30000-30100
TOKEN_BYTES = 16
JOIN = 1  # the first connection of two ranks
RESUME = 2  # a connection in place of a broken one; its number is how many bytes the sender has received
ASK = 3  # asks the receiver, which must open connections, for a `RESUME`; open as long as the sender waits
LOST = 4  # the sender gives up because of the rank that is its number
# Protocol, kind, rank, token, number. The protocol changes with every change of the bytes that ranks send.
_HELLO = struct.Struct(f"<4sII{TOKEN_BYTES}sQ")
_PROTOCOL = b"tfd1"
_BACKLOG = 1024
_MOST_GUESTS = 64  # connections whose hello has not arrived; a flood of strangers drops the oldest of them
_HELLO_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first bytes of a connection: their `kind`, the sender's rank, and a number."""

    kind: int
    rank: int
    number: int = 0

    def pack(self, token: bytes) -> bytes:
        """Returns the bytes to send."""
        return _HELLO.pack(_PROTOCOL, self.kind, self.rank, token, self.number)


class Door:
    """A listening socket. It takes connections whose hello has the job's token, and closes others without waiting for them.

    Attributes:
        address: `host:port`, where others reach it.
    """

    def __init__(self, host: str):
        self._listener = _listen(host)
        self._token = b""
        self._guests: collections.OrderedDict[int, _Guest] = collections.OrderedDict()
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def open(self, token: bytes) -> None:
        """Sets the token that the hello of a connection must have."""
        self._token = token

    def fileno(self) -> int:
        """Returns the listener's descriptor, which is ready to read when somebody connects."""
        return self._listener.fileno()

    def take(self) -> list[tuple[Hello, socket.socket]]:
        """Returns the connections whose hello has arrived. Does not wait."""
        for _ in range(_MOST_GUESTS):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # none is there, or it has gone again
                break
            connection.setblocking(False)
            self._guests[connection.fileno()] = _Guest(connection, time.monotonic() + _HELLO_SECONDS)
            if len(self._guests) > _MOST_GUESTS:
                self._dismiss(next(iter(self._guests)), "too many connections wait")
        return [found for number in list(self._guests) if (found := self._hear(number))]

    def wait(self, seconds: float) -> list[tuple[Hello, socket.socket]]:
        """Returns the connections whose hello has arrived, at least one. Raises TimeoutError if none has in time."""
        limit = time.monotonic() + seconds
        while True:
            found = self.take()
            if found:
                return found
            poll = select.poll()
            for number in self.descriptors():
                poll.register(number, select.POLLIN)
            if not poll.poll(max(0.0, 1000 * (limit - time.monotonic()))):
                raise TimeoutError(f"nobody has connected within {seconds:g} seconds")

    def descriptors(self) -> list[int]:
        """Returns the descriptors that are ready to read when `take` may have something to return."""
        return [self.fileno(), *self._guests]

    def _hear(self, number: int) -> tuple[Hello, socket.socket] | None:
        guest = self._guests[number]
        try:
            content = guest.connection.recv(_HELLO.size - len(guest.heard))
        except BlockingIOError:
            if time.monotonic() > guest.limit:
                self._dismiss(number, "it sent no hello")
            return None
        except OSError:
            content = b""
        guest.heard += content
        if not content:
            self._dismiss(number, "it closed the connection")
        elif len(guest.heard) == _HELLO.size:
            hello = unpack(guest.heard, self._token)
            if hello:
                del self._guests[number]
                return hello, guest.connection
            self._dismiss(number, "it does not belong to the job")
        return None

    def _dismiss(self, number: int, reason: str) -> None:
        connection = self._guests.pop(number).connection
        try:
            who = connection.getpeername()[0]
        except OSError:
            who = "somebody"
        connection.close()
        logger.debug(f"the port of gradients closes a connection from {who}: {reason}.")

    def close(self) -> None:
        """Closes the port."""
        for guest in self._guests.values():
            guest.connection.close()
        self._guests.clear()
        self._listener.close()


@dataclasses.dataclass
class _Guest:
    """A connection whose hello has not arrived: its bytes so far, and the time until which it may take."""

    connection: socket.socket
    limit: float
    heard: bytes = b""


def unpack(content: bytes, token: bytes) -> Hello | None:
    """Returns the hello of some bytes, or None if they are none of this job."""
    protocol, kind, rank, given, number = _HELLO.unpack(content)
    known = hmac.compare_digest(given, token)
    if not known or protocol != _PROTOCOL:
        return None
    return Hello(kind, rank, number)


def receive(connection: socket.socket, token: bytes, seconds: float) -> Hello | None:
    """Returns the hello that answers this rank's; None if it has not arrived in time. Raises OSError if the connection breaks."""
    content = b""
    limit = time.monotonic() + seconds
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while len(content) < _HELLO.size:
        if not poll.poll(max(0.0, 1000 * (limit - time.monotonic()))):
            return None
        heard = connection.recv(_HELLO.size - len(content))
        if not heard:
            raise ConnectionResetError("the connection was closed")
        content += heard
    hello = unpack(content, token)
    if hello is None:
        raise ConnectionResetError("another program answers at its port")
    return hello


def call(address: str, hello: Hello, token: bytes, seconds: float) -> socket.socket:
    """Returns a connection to another rank's door, which has got a hello. Raises OSError."""
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), seconds)
    try:
        connection.sendall(hello.pack(token))
    except OSError:
        connection.close()
        raise
    connection.setblocking(False)
    return connection


def own_address(rank: int, addresses: Sequence[str]) -> str:
    """Returns this host's address on the network where it reaches the other ranks, whose `host:port` are `addresses`."""
    host, port = addresses[0 if rank else -1].rsplit(":", 1)
    family, kind, _, _, peer_address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer_address)  # sends nothing
        return str(probe.getsockname()[0])


def _listen(host: str) -> socket.socket:
    ports = allowed_ports(os.environ.get(PORTS, ""))
    random.SystemRandom().shuffle(ports)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    refused: OSError | None = None
    for port in ports or [0]:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, port))
            listener.listen(_BACKLOG)
        except OSError as e:
            listener.close()
            refused = e
        else:
            listener.setblocking(False)
            return listener
    raise OSError(f"no port of {PORTS}={os.environ.get(PORTS)} is free: {refused}" if ports else str(refused))


def allowed_ports(text: str) -> list[int]:
    """Returns the ports of a text such as `30000-30100`; none for an empty one. Raises ConfigError."""
    if not text:
        return []
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text.strip())
    if found:
        first = int(found[1])
        last = int(found[2] or found[1])
        if 0 < first <= last < 2**16:
            return list(range(first, last + 1))
    raise ConfigError(f"{PORTS} must be a port or two with a hyphen between, as 30000-30100. Received: {text!r}.")
