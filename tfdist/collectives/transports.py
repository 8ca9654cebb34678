"""The transports that TensorFlow does not have, and how the workers connect by them.

A `Meeting` is what the workers of a cluster tell each other before they have a transport of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfdist.collectives import gloo, mpi, shared_memory, shared_memory_rendezvous, two_level
from tfdist.collectives.buffer_transport import BufferTransport, NoTransportError
from tfdist.collectives.ranks import Ranks
from tfdist.compat import tf_cluster
from tfdist.errors import truncate
from tfdist.runtime.log import logger

_SECONDS = 60.0  # for which a worker's text is waited for, which it has published before


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A transport that TensorFlow does not have.

    Attributes:
        why_not: Returns why this process cannot use it, or an empty text.
        connect: Connects some workers, whose numbers it is given; returns the transport, or raises `NoTransportError`. A collective
            of all workers; what it returns on the others is only to be closed.
        across_hosts: Whether it connects one worker of each host where several of them can share memory.
    """

    why_not: Callable[[Meeting], str]
    connect: Callable[[Meeting, Sequence[int]], BufferTransport | None]
    across_hosts: bool = False


def _share_memory(meeting: Meeting, members: Sequence[int]) -> BufferTransport:
    ranks, name = meeting.ranks, f"{meeting.name}/memory"
    return shared_memory.connect(ranks.rank, ranks.size, put_text, get_text, name, meeting.timeout_seconds)


CANDIDATES: Mapping[str, Candidate] = {
    "gloo": Candidate(
        lambda meeting: gloo.why_not(meeting.ranks.rank, meeting.addresses),
        lambda meeting, members: gloo.connect(
            meeting.ranks.rank, meeting.addresses, members, put_text, get_text, f"{meeting.name}/gloo"
        ),
        across_hosts=True,
    ),
    "mpi": Candidate(
        lambda meeting: mpi.why_not(meeting.ranks.size),
        lambda meeting, members: mpi.connect(meeting.ranks.rank, meeting.ranks.size, members),
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


def connect(name: str, meeting: Meeting, unfit: str) -> Connected:
    """Connects the workers by a transport, in two levels where that saves bytes. A collective.

    Args:
        name: One of `CANDIDATES`.
        meeting: The workers.
        unfit: Why this worker cannot use any of them, or an empty text.
    """
    transport, way = None, name
    reason = meeting.first_reason(f"{name}/fit", unfit or CANDIDATES[name].why_not(meeting))
    if not reason:
        mine = ""
        try:
            transport, way = _connect(name, meeting)
        except NoTransportError as e:
            mine = str(e)
        reason = meeting.first_reason(f"{name}/connected", mine)
    return Connected(None if reason else transport, way, reason)


def _connect(name: str, meeting: Meeting) -> tuple[BufferTransport | None, str]:
    candidate, ranks = CANDIDATES[name], meeting.ranks
    keys = meeting.texts(f"{name}/host", shared_memory_rendezvous.host_key()) if candidate.across_hosts else []
    if two_level.saves(hosts := two_level.group(keys)):
        transport, reason = two_level.connect(
            *(ranks.rank, hosts, put_text, get_text, f"{meeting.name}/local", meeting.timeout_seconds),
            agree=lambda mine: meeting.first_reason(f"{name}/local", mine),
            connect_leaders=lambda leaders: candidate.connect(meeting, leaders),
        )
        if transport:
            return transport, f"{name} between {len(hosts)} hosts, and by shared memory within"
        if ranks.is_chief:
            logger.info(f"workers of one host cannot share memory, and exchange gradients by {name}, too: {reason}.")
    return candidate.connect(meeting, range(ranks.size)), name


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What connects the workers of a new transport.

    Attributes:
        name: Another one for each meeting, the same on all workers.
        ranks: Exchanges numbers among the workers.
        workers: The names of all.
        addresses: `host:port` of each.
        timeout_seconds: How long an exchange may take; 0 means for ever.
    """

    name: str
    ranks: Ranks
    workers: Sequence[str]
    addresses: Sequence[str]
    timeout_seconds: float

    def texts(self, what: str, mine: str) -> list[str]:
        """Returns each worker's text. A collective.

        Args:
            what: What it is about; another one at each call.
            mine: This worker's.
        """
        key = f"{self.name}/{what}"
        put_text(f"{key}/{self.ranks.rank}", f"{mine} ")  # TensorFlow takes no empty text
        self.ranks.barrier()
        return [get_text(f"{key}/{rank}", _SECONDS)[:-1] for rank in range(self.ranks.size)]

    def first_reason(self, what: str, mine: str) -> str:
        """Returns the first worker's text that is not empty, and whose it is unless it is all workers'. A collective.

        Args:
            what: As of `texts`.
            mine: This worker's.
        """
        texts = self.texts(what, mine)
        first = next(filter(None, texts), "")
        who = [worker for worker, text in zip(self.workers, texts, strict=True) if text == first]
        return first if len(who) == self.ranks.size else f"{first} ({truncate(', '.join(who))})"


def put_text(key: str, text: str) -> None:
    """Makes a text known to all workers, for ever."""
    tf_cluster.publish(key, text)


def get_text(key: str, seconds: float) -> str:
    """Returns the text of a key, or raises TensorFlow's error when there is none within some seconds."""
    return tf_cluster.published(key, max(1, int(1000 * seconds)))
