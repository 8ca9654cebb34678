"""Names of hosts to addresses, and the addresses of this machine. No TensorFlow here."""

from __future__ import annotations

import ipaddress
import socket


def host_of(address: str) -> str:
    """Returns the host of `host:port`, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def resolve(host: str) -> set[str]:
    """Returns the addresses of a host's name. May take long: call it in a thread.

    Raises:
        OSError: The name is not known.
    """
    try:
        return {_bare(str(entry[4][0])) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except UnicodeError:  # a part of the name is too long, or empty
        raise OSError("no name of a host") from None


def own() -> set[str]:
    """Returns all addresses of this machine, and those that each machine has."""
    import psutil

    found = {
        _bare(entry.address)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    return found | {f"127.0.{part}.1" for part in (0, 1)} | {"::1", "0.0.0.0"}


def is_loopback(address: str) -> bool:
    """Returns whether each machine means itself by an address."""
    return ipaddress.ip_address(address).is_loopback


def _bare(address: str) -> str:
    return address.partition("%")[0]  # without the zone of an IPv6 address
