"""A transport over gloo, PyTorch's library for collectives on CPUs. It uses TCP and needs no process manager."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.collectives.buffer_transport import ExchangedTransport, NoTransportError, Store
from tfdist.compat import gloo_group
from tfdist.errors import describe_error

_INSTALL = "pip install 'tfdist[gloo]'"
_INTERFACE = "GLOO_SOCKET_IFNAME"  # PyTorch's environment variable that names the network interface
_NO_LIMIT = datetime.timedelta(days=365)  # the caller limits the wait


def why_not(rank: int, addresses: Sequence[str]) -> str:
    """Returns why this process cannot use gloo, with the remedy; or an empty text.

    Args:
        rank: This process's rank.
        addresses: `host:port` of each rank.
    """
    if importlib.util.find_spec("torch") is None:
        return f"PyTorch, which has gloo, is not installed: {_INSTALL}"
    try:
        library = importlib.import_module("torch.distributed")
    except Exception as e:  # a library that PyTorch needs is missing, or has another version
        return f"PyTorch, which has gloo, cannot be imported: {describe_error(e)}"
    if not (library.is_available() and library.is_gloo_available()):
        return f"this PyTorch has no gloo: {_INSTALL}"
    try:
        _device(library, rank, addresses)
    except (RuntimeError, OSError) as e:
        return f"gloo finds no network{_named()} to listen on: {describe_error(e)}"
    return ""


def connect(store: Store, addresses: Sequence[str], members: Sequence[int]) -> GlooTransport | None:
    """Connects `members`; returns None on the other ranks. A collective of all ranks.

    Args:
        store: The store of all ranks.
        addresses: `host:port` of each rank. gloo uses the network of these addresses, and free ports.
        members: The ranks to connect, in their order in the transport.

    Raises:
        NoTransportError: The ranks cannot reach each other; the message says why.
    """
    if store.rank not in members:
        return None
    rank, addresses = members.index(store.rank), [addresses[member] for member in members]
    library = importlib.import_module("torch.distributed")
    torch_store = _torch_store(library, store)
    try:
        device = _device(library, rank, addresses)
        group = gloo_group.create_group(library, torch_store, rank, len(addresses), device, store.seconds)
    except Exception as e:  # an error of PyTorch, the system or the store
        raise NoTransportError(f"gloo{_named()} could not connect the workers: {describe_error(e)}") from e
    return GlooTransport(group, torch_store)


def _device(library: Any, rank: int, addresses: Sequence[str]) -> Any:
    interface = os.environ.get(_INTERFACE, "")
    return gloo_group.create_device(library, "" if interface else _own_address(rank, addresses), interface)


def _named() -> str:
    return f" (of {_INTERFACE}={interface})" if (interface := os.environ.get(_INTERFACE)) else ""


def _own_address(rank: int, addresses: Sequence[str]) -> str:
    """Returns this host's address on the network where it reaches the other ranks."""
    host, port = addresses[0 if rank else -1].rsplit(":", 1)
    family, kind, _, _, peer_address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer_address)  # sends nothing
        return str(probe.getsockname()[0])


def _torch_store(library: Any, store: Store) -> Any:
    """Returns `store` as a PyTorch store, for gloo's addresses. PyTorch's own TCP store would need one more open port."""

    class TorchStore(library.Store):
        def set(self, key: str, value: bytes) -> None:
            store.put(key, bytes(value).hex())

        def get(self, key: str) -> bytes:
            return bytes.fromhex(store.get(key))

        def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
            for key in keys:
                self.get(key)

        def has_extended_api(self) -> bool:
            return False

    return TorchStore()


class GlooTransport(ExchangedTransport):
    """A transport over gloo.

    Args:
        group: PyTorch's group of all ranks.
        store: The group's store, which must live as long as the group.
    """

    def __init__(self, group: Any, store: Any):
        self._torch, self._group, self._store = importlib.import_module("torch"), group, store
        self.rank, self.size = group.rank(), group.size()

    def _exchange(self, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        works = []
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            works.append(self._group.recv([self._torch.from_numpy(received[source])], source, 0))
            works.append(self._group.send([self._torch.from_numpy(sent[target])], target, 0))
        for work in works:
            work.wait(_NO_LIMIT)

    def close(self) -> None:
        self._group.barrier().wait()  # other ranks may still be reading what this rank has sent
        del self._group, self._store
