"""PyTorch's group of processes over gloo, whose options have no public name."""

from __future__ import annotations

import datetime
import types
from typing import Any


def create_device(library: types.ModuleType, address: str, interface: str) -> Any:
    """Returns gloo's object for a network, which listens at a port that the system chooses.

    Args:
        library: The module `torch.distributed`.
        address: This host's address on the network.
        interface: The network's name, in place of the address; may be empty.

    Raises:
        RuntimeError: There is no such network on this host.
    """
    options = {"interface": interface} if interface else {"hostname": address}
    return library.ProcessGroupGloo.create_device(**options)


def create_group(library: types.ModuleType, store: Any, rank: int, size: int, device: Any, seconds: float) -> Any:
    """Connects all ranks, and returns their group. A collective.

    Args:
        library: The module `torch.distributed`.
        store: Where the ranks tell each other their addresses.
        rank: This process's number.
        size: The number of ranks.
        device: As `create_device` returns it.
        seconds: Limit of each wait while they connect, and of calls that name none.

    Raises:
        RuntimeError: They could not be connected.
    """
    options = library.ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = datetime.timedelta(seconds=seconds)
    options._threads = 1  # one exchange is under way at a time
    return library.ProcessGroupGloo(store, rank, size, options)
