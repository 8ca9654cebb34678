"""PyTorch's group of processes over gloo, whose options have no public name."""

from __future__ import annotations

import datetime
import types
from typing import Any


def create_device(library: types.ModuleType, address: str, interface: str) -> Any:
    """Returns gloo's device for a network, which listens at a port that the system chooses.

    Args:
        library: The module `torch.distributed`.
        address: This host's address on the network.
        interface: The name of the network interface, which replaces the address; may be empty.

    Raises:
        RuntimeError: This host does not have that address or interface.
    """
    options = {"interface": interface} if interface else {"hostname": address}
    return library.ProcessGroupGloo.create_device(**options)


def create_group(library: types.ModuleType, store: Any, rank: int, size: int, device: Any, seconds: float) -> Any:
    """Connects all ranks, and returns their group. A collective.

    Args:
        library: The module `torch.distributed`.
        store: The store through which the ranks exchange their addresses.
        rank: This process's rank.
        size: The number of ranks.
        device: The result of `create_device`.
        seconds: Timeout of each wait while ranks connect, and of later calls without a timeout.

    Raises:
        RuntimeError: The ranks could not connect.
    """
    options = library.ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = datetime.timedelta(seconds=seconds)
    options._threads = 1  # one exchange runs at a time
    return library.ProcessGroupGloo(store, rank, size, options)
