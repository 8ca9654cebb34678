"""Connects the workers by one of the transports that TensorFlow does not have (`CANDIDATES`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfdist.collectives import gloo, mpi, shared_memory, shared_memory_rendezvous, two_level
from tfdist.collectives.buffer_transport import BufferTransport, NoTransportError
from tfdist.collectives.ranks import Ranks
from tfdist.compat import tf_cluster
from tfdist.errors import truncate
from tfdist.runtime.log import logger

_PUBLISHED_SECONDS = 60.0  # limit for a text that has been published


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A transport that TensorFlow does not have.

    Attributes:
        why_not: Returns why this process cannot use it, or an empty text.
        connect: Connects some workers, whose numbers it is given; returns the transport, or raises `NoTransportError`. A collective
            of all workers; what it returns on the others is only to be closed.
        across_hosts: Whether it connects one worker of each host where several of them can share memory.
    """

    why_not: Callable[[Bootstrap], str]
    connect: Callable[[Bootstrap, Sequence[int]], BufferTransport | None]
    across_hosts: bool = False


def _share_memory(bootstrap: Bootstrap, members: Sequence[int]) -> BufferTransport:
    ranks, name = bootstrap.ranks, f"{bootstrap.name}/memory"
    return shared_memory.connect(ranks.rank, ranks.size, publish_text, await_text, name, bootstrap.timeout_seconds)


CANDIDATES: Mapping[str, Candidate] = {
    "gloo": Candidate(
        lambda bootstrap: gloo.why_not(bootstrap.ranks.rank, bootstrap.addresses),
        lambda bootstrap, members: gloo.connect(
            bootstrap.ranks.rank, bootstrap.addresses, members, publish_text, await_text, f"{bootstrap.name}/gloo"
        ),
        across_hosts=True,
    ),
    "mpi": Candidate(
        lambda bootstrap: mpi.why_not(bootstrap.ranks.size),
        lambda bootstrap, members: mpi.connect(bootstrap.ranks.rank, bootstrap.ranks.size, members),
        across_hosts=True,
    ),
    "shared_memory": Candidate(lambda _: "", _share_memory),
}


@dataclasses.dataclass(frozen=True)
class Connected:
    """What connects the workers, or why nothing does, the same on all of them.

    Attributes:
        transport: What does, or None.
        way: How to name it.
        reason: Why nothing does, or an empty text.
    """

    transport: BufferTransport | None
    way: str
    reason: str


def connect(name: str, bootstrap: Bootstrap, unfit: str) -> Connected:
    """Connects the workers by a transport, in two levels where that saves bytes. A collective.

    Args:
        name: One of `CANDIDATES`.
        bootstrap: The workers.
        unfit: Why this worker cannot use any of them, or an empty text.
    """
    transport, way = None, name
    reason = bootstrap.first_reason(f"{name}/fit", unfit or CANDIDATES[name].why_not(bootstrap))
    if not reason:
        mine = ""
        try:
            transport, way = _connect(name, bootstrap)
        except NoTransportError as e:
            mine = str(e)
        reason = bootstrap.first_reason(f"{name}/connected", mine)
    return Connected(None if reason else transport, way, reason)


def _connect(name: str, bootstrap: Bootstrap) -> tuple[BufferTransport | None, str]:
    candidate, ranks = CANDIDATES[name], bootstrap.ranks
    keys = bootstrap.gather_texts(f"{name}/host", shared_memory_rendezvous.host_key()) if candidate.across_hosts else []
    if two_level.saves(hosts := two_level.group(keys)):
        transport, reason = two_level.connect(
            *(ranks.rank, hosts, publish_text, await_text, f"{bootstrap.name}/local", bootstrap.timeout_seconds),
            agree=lambda mine: bootstrap.first_reason(f"{name}/local", mine),
            connect_leaders=lambda leaders: candidate.connect(bootstrap, leaders),
        )
        if transport:
            return transport, f"{name} between {len(hosts)} hosts, and by shared memory within"
        if ranks.is_chief:
            logger.info(f"workers of one host cannot share memory, and exchange gradients by {name}, too: {reason}.")
    return candidate.connect(bootstrap, range(ranks.size)), name


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """Exchanges texts among the workers, before they have a transport.

    Attributes:
        name: Begins the keys of its texts: unique to each bootstrap, the same on all workers.
        ranks: Exchanges numbers among the workers.
        workers: The names of all workers.
        addresses: `host:port` of each worker.
        timeout_seconds: Limit of one exchange of the transport; 0 means no limit.
    """

    name: str
    ranks: Ranks
    workers: Sequence[str]
    addresses: Sequence[str]
    timeout_seconds: float

    def gather_texts(self, what: str, mine: str) -> list[str]:
        """Returns each worker's text. A collective.

        Args:
            what: Its subject; unique to each call.
            mine: This worker's text.
        """
        key = f"{self.name}/{what}"
        publish_text(f"{key}/{self.ranks.rank}", f"{mine} ")  # TensorFlow takes no empty text
        self.ranks.barrier()
        return [await_text(f"{key}/{rank}", _PUBLISHED_SECONDS)[:-1] for rank in range(self.ranks.size)]

    def first_reason(self, what: str, mine: str) -> str:
        """Returns the first worker's text that is not empty, and whose it is unless it is all workers'. A collective.

        Args:
            what: As of `gather_texts`.
            mine: This worker's text.
        """
        texts = self.gather_texts(what, mine)
        first = next(filter(None, texts), "")
        who = [worker for worker, text in zip(self.workers, texts, strict=True) if text == first]
        return first if len(who) == self.ranks.size else f"{first} ({truncate(', '.join(who))})"


def publish_text(key: str, text: str) -> None:
    """Makes a text known to all workers, as long as the cluster lives."""
    tf_cluster.publish(key, text)


def await_text(key: str, seconds: float) -> str:
    """Waits for the text of a key and returns it; raises TensorFlow's error if there is none within some seconds."""
    return tf_cluster.published(key, max(1, int(1000 * seconds)))
