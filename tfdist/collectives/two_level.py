"""A transport of two levels: within each host through shared memory, and between the hosts by one rank of each.

Does not import TensorFlow. The first rank of a host is its leader. It sends the host's data over the network once, however many ranks
the host has. The data are the sum of their arrays, or all their rows in one message per other host. Then it broadcasts the result within its host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from tfdist.collectives import shared_memory
from tfdist.collectives.buffer_transport import BufferTransport, NoTransportError, Store, check_rows
from tfdist.collectives.shared_memory import SharedMemoryTransport


def group(keys: Sequence[str]) -> list[list[int]]:
    """Returns the ranks of each host, `[hosts][ranks]`, in the order of the hosts' first ranks, from a key of each rank's host."""
    hosts: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        hosts.setdefault(key, []).append(rank)
    return list(hosts.values())


def saves(hosts: Sequence[Sequence[int]]) -> bool:
    """Returns whether two levels send less than one: there are several hosts, and one of them has several ranks."""
    return len(hosts) > 1 and any(len(ranks) > 1 for ranks in hosts)


def connect(
    store: Store,
    hosts: Sequence[Sequence[int]],
    timeout_seconds: float,
    agree: Callable[[str], str],
    connect_leaders: Callable[[Sequence[int]], BufferTransport | None],
) -> tuple[TwoLevelTransport | None, str]:
    """Returns the transport and an empty text; or, on all ranks, None and why the ranks of a host cannot share memory. A collective.

    Args:
        store: The store of all ranks.
        hosts: The ranks of each host.
        timeout_seconds: Limit of each wait for another rank of the host, which may itself wait for other hosts; 0 means no limit.
        agree: `Ranks.agree`, a collective of all ranks.
        connect_leaders: Connects the first ranks of all hosts, which it receives. A collective of all ranks.

    Raises:
        NoTransportError: The leaders cannot reach each other; the message says why. Other ranks need not raise it.
    """
    number = _host_of(store.rank, hosts)
    local = None
    reason = ""
    try:
        local = shared_memory.connect(store.part(str(number), hosts[number]), timeout_seconds)
    except NoTransportError as e:
        reason = str(e)
    reason = agree(reason)
    if local is None:
        return None, reason
    if reason:
        local.close()
        return None, reason
    try:
        across = connect_leaders([ranks_of_host[0] for ranks_of_host in hosts])
    except NoTransportError:
        local.close()
        raise
    return TwoLevelTransport(store.rank, hosts, local, across), ""


def _host_of(rank: int, hosts: Sequence[Sequence[int]]) -> int:
    return next(number for number, ranks in enumerate(hosts) if rank in ranks)


class TwoLevelTransport(BufferTransport):
    """A transport that sums within each host, then between the hosts.

    16-bit floats are summed in float32 and rounded within the host, and again between the hosts: so they cross the network as
    16 bits.

    After an error on a leader the other ranks of its host raise ConnectionError, as they do if it dies.

    `hosts` are the ranks of each host, the leader first. `across` connects the leaders, in this order; other ranks have None, or a
    transport that must only be closed.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[Sequence[int]],
        local: SharedMemoryTransport,
        across: BufferTransport | None,
    ):
        self.rank = rank
        self.size = sum(map(len, hosts))
        self._hosts = hosts
        self._local = local
        self._across = across
        self.checks_calls = across.checks_calls if across else local.checks_calls
        self._most = max(map(len, hosts))
        self._host_of_rank = np.array([_host_of(r, hosts) for r in range(self.size)])
        self._local_rank_of_rank = np.array([hosts[self._host_of_rank[r]].index(r) for r in range(self.size)])

    def all_reduce(self, array: np.ndarray, largest: bool = False) -> np.ndarray:
        total = self._local.all_reduce(array, largest)
        return self._lead(total.shape, total.dtype, lambda across: across.all_reduce(total, largest))

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        host_rows = self._local.all_gather(array)

        def gather(across: BufferTransport) -> np.ndarray:
            padded = np.zeros((self._most, *array.shape), array.dtype)  # all hosts send the same shape
            padded[: len(host_rows)] = host_rows
            return across.all_gather(padded)[self._host_of_rank, self._local_rank_of_rank]

        return self._lead((self.size, *array.shape), array.dtype, gather)

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        check_rows(array, self.size)
        host_rows = self._local.all_gather(array)  # [from, to, ...]

        def exchange(across: BufferTransport) -> np.ndarray:
            padded = np.zeros((len(self._hosts), self._most, self._most, *array.shape[1:]), array.dtype)
            for number, ranks in enumerate(self._hosts):
                padded[number, : len(host_rows), : len(ranks)] = host_rows[:, ranks]
            return across.all_to_all(padded)[self._host_of_rank, self._local_rank_of_rank]

        # All rows for this host's ranks, [from, to, ...]. All of them are broadcast, because memory is faster than the network.
        every = self._lead((self.size, self._most, *array.shape[1:]), array.dtype, exchange)
        return np.ascontiguousarray(every[:, self._local.rank])

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        check_rows(array, self.size)
        total = self._local.all_reduce(array)

        def scatter(across: BufferTransport) -> np.ndarray:
            # Row h has the rows of the ranks of host h.
            padded = np.zeros((len(self._hosts), self._most, *array.shape[1:]), array.dtype)
            for number, ranks in enumerate(self._hosts):
                padded[number, : len(ranks)] = total[ranks]
            return across.reduce_scatter(padded)

        host_rows = self._lead((self._most, *array.shape[1:]), array.dtype, scatter)
        return np.array(host_rows[self._local.rank])

    def _lead(
        self, shape: tuple[int, ...], dtype: np.dtype, work: Callable[[BufferTransport], np.ndarray]
    ) -> np.ndarray:
        """Returns the leader's result from the other hosts, on all ranks of this host."""
        if self._local.rank:
            return self._local.broadcast(np.empty(shape, dtype), 0)
        try:
            result = work(cast(BufferTransport, self._across))
        except BaseException:  # Ctrl-C, too
            self._local.close()  # otherwise the other ranks of this host would wait
            raise
        return self._local.broadcast(result, 0)

    def close(self) -> None:
        if self._across:
            self._across.close()
        self._local.close()
