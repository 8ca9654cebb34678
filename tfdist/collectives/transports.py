"""The transports that TensorFlow does not have, and how the workers connect by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfdist.collectives import gloo, mpi, shared_memory, shared_memory_rendezvous, two_level
from tfdist.collectives.buffer_transport import BufferTransport, NoTransportError
from tfdist.collectives.meeting import Meeting, get, put
from tfdist.runtime.log import logger


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
    return shared_memory.connect(ranks.rank, ranks.size, put, get, name, meeting.timeout_seconds)


CANDIDATES: Mapping[str, Candidate] = {
    "gloo": Candidate(
        lambda meeting: gloo.why_not(meeting.ranks.rank, meeting.addresses),
        lambda meeting, members: gloo.connect(
            meeting.ranks.rank, meeting.addresses, members, put, get, f"{meeting.name}/gloo"
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
            *(ranks.rank, hosts, put, get, f"{meeting.name}/local", meeting.timeout_seconds),
            agree=lambda mine: meeting.first_reason(f"{name}/local", mine),
            connect_leaders=lambda leaders: candidate.connect(meeting, leaders),
        )
        if transport:
            return transport, f"{name} between {len(hosts)} hosts, and by shared memory within"
        if ranks.is_chief:
            logger.info(f"workers of one host cannot share memory, and exchange gradients by {name}, too: {reason}.")
    return candidate.connect(meeting, range(ranks.size)), name
