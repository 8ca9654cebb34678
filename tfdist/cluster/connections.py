"""Shuts down this process's own connections to a task that does not answer. No TensorFlow here.

A call to a process that is stopped, or whose host has vanished, waits for ever: the connection stays as it was. Once this side
has shut it down, the call fails as if the process had been killed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_REMOTE, _INODE = 2, 9  # columns
Endpoint = tuple[str, int]  # address and port


def resolve(address: str) -> set[Endpoint]:
    """Returns the addresses and ports that `host:port` stands for; none where the name is not known now."""
    host, port = address.rsplit(":", 1)
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        return {(_plain(ipaddress.ip_address(str(each[4][0]).partition("%")[0])), int(port)) for each in found}
    return set()


def shut_down(endpoints: set[Endpoint]) -> int:
    """Shuts down this process's TCP connections to `endpoints`, also those that are being made.

    Returns:
        How many there were. 0 on systems without `/proc/self/net`, which are not Linux.
    """
    inodes = {inode for remote, inode in _connections() if remote in endpoints}
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


def _connections() -> Iterator[tuple[Endpoint, str]]:
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines, "")
            for line in lines:
                columns = line.split()
                host, port = columns[_REMOTE].split(":")
                yield (_decode(host), int(port, 16)), columns[_INODE]


def _decode(digits: str) -> str:
    """Returns the address that the system writes as words of 32 bits, in the processor's order of bytes."""
    words = (int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8))
    return _plain(ipaddress.ip_address(b"".join(words)))


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """Returns the text of an address; of an IPv4 address on a socket of IPv6, the IPv4 address."""
    return str(getattr(address, "ipv4_mapped", None) or address)
