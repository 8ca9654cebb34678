"""Connects the workers by one of the transports that TensorFlow does not have (`CANDIDATES`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfdist.collectives import mpi, shared_memory, shared_memory_rendezvous, tcp, two_level
from tfdist.collectives.buffer_transport import BufferTransport, NoTransportError, Store
from tfdist.collectives.ranks import Ranks
from tfdist.compat import tf_cluster
from tfdist.runtime.log import logger


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A transport that TensorFlow does not have.

    Attributes:
        why_not: Returns why this process cannot use it, or an empty text.
        connect: Connects the workers with the passed ranks; returns the transport, or raises `NoTransportError`. A collective of
            all workers; the other workers may only close the result.
        across_hosts: Whether it connects only one worker of each host if the host's workers can share memory.
    """

    why_not: Callable[[Bootstrap], str]
    connect: Callable[[Bootstrap, Sequence[int]], BufferTransport | None]
    across_hosts: bool = False


CANDIDATES: Mapping[str, Candidate] = {
    "mpi": Candidate(
        lambda bootstrap: mpi.why_not(bootstrap.ranks.size),
        lambda bootstrap, members: mpi.connect(bootstrap.ranks.rank, bootstrap.ranks.size, members),
        across_hosts=True,
    ),
    "shared_memory": Candidate(
        lambda _: "",
        lambda bootstrap, _: shared_memory.connect(bootstrap.store().part("memory"), bootstrap.timeout_seconds),
    ),
    "tcp": Candidate(
        lambda bootstrap: tcp.why_not(bootstrap.ranks.rank, bootstrap.addresses),
        lambda bootstrap, members: tcp.connect(
            bootstrap.store().part("tcp"), bootstrap.addresses, members, bootstrap.timeout_seconds
        ),
        across_hosts=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Connected:
    """The transport between the workers, or the reason why there is none; equal on all workers.

    Attributes:
        transport: The transport, or None.
        way: The transport's name with its levels, for messages.
        reason: Why there is no transport, or an empty text.
    """

    transport: BufferTransport | None
    way: str
    reason: str


def connect(name: str, bootstrap: Bootstrap, unfit: str) -> Connected:
    """Connects the workers by a transport, in two levels where that saves bytes. A collective.

    `unfit` says why this worker cannot use any of `CANDIDATES`; empty if it can.
    """
    reason = bootstrap.ranks.agree(unfit or CANDIDATES[name].why_not(bootstrap))
    if reason:
        return Connected(None, name, reason)
    transport = None
    way = name
    local_reason = ""
    try:
        transport, way = _connect(name, bootstrap)
    except NoTransportError as e:
        local_reason = str(e)
    reason = bootstrap.ranks.agree(local_reason)
    return Connected(None if reason else transport, way, reason)


def _connect(name: str, bootstrap: Bootstrap) -> tuple[BufferTransport | None, str]:
    candidate = CANDIDATES[name]
    ranks = bootstrap.ranks
    keys = ranks.gather_texts(shared_memory_rendezvous.host_key()) if candidate.across_hosts else []
    hosts = two_level.group(keys)
    if two_level.saves(hosts):
        transport, reason = two_level.connect(
            bootstrap.store().part("local"),
            hosts,
            bootstrap.timeout_seconds,
            agree=ranks.agree,
            connect_leaders=lambda leaders: candidate.connect(bootstrap, leaders),
        )
        if transport:
            return transport, f"{name} between {len(hosts)} hosts, and by shared memory within"
        if ranks.is_chief:
            logger.info(f"workers of one host cannot share memory, and exchange gradients by {name}, too: {reason}.")
    return candidate.connect(bootstrap, range(ranks.size)), name


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """The workers before they have a transport.

    Attributes:
        name: Prefix of the keys in the store; unique to each bootstrap, equal on all workers.
        ranks: Exchanges numbers and texts among the workers.
        addresses: `host:port` of each worker.
        timeout_seconds: Limit of one exchange of the transport; 0 means no limit.
    """

    name: str
    ranks: Ranks
    addresses: Sequence[str]
    timeout_seconds: float

    def store(self) -> Store:
        """Returns the store of all workers. TensorFlow's coordination service keeps the texts while the cluster lives."""
        return Store(self.ranks.rank, self.ranks.size, tf_cluster.publish, tf_cluster.published, self.name)
