"""By what gradients travel between workers: TensorFlow's collectives, or what `strategy.transport` names; the same on all of them."""

from __future__ import annotations

import atexit
import dataclasses
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.collectives import gloo, mpi, shared_memory, shared_memory_rendezvous, two_level
from tfdist.collectives.buffer_transport import BufferTransport, NoTransportError
from tfdist.collectives.buffered import BufferedCommunicator
from tfdist.collectives.communicator import Communicator
from tfdist.collectives.cross_process import CrossProcessCommunicator
from tfdist.collectives.ranks import Ranks
from tfdist.compat import tf_cluster
from tfdist.config.strategy import TENSORFLOW_TRANSPORTS, TRANSPORTS
from tfdist.errors import ClusterError, ConfigError, told, truncate
from tfdist.runtime import exit_status
from tfdist.runtime.log import logger

_END_SECONDS = 10.0  # for which the end of a transport is waited for
_MEETING_SECONDS = 60.0  # for which a worker's text is waited for, which it has published before
_DEVICES = "it moves arrays of one CPU, and each worker must have one replica, on its CPU"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What connects the workers of a new transport.

    Attributes:
        name: Another one for each transport, the same on all workers.
        rank: This worker's number.
        workers: The names of all.
        addresses: `host:port` of each.
        timeout_seconds: How long an exchange may take; 0 means for ever.
    """

    name: str
    rank: int
    workers: Sequence[str]
    addresses: Sequence[str]
    timeout_seconds: float


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
    size, name = len(meeting.workers), f"{meeting.name}/memory"
    return shared_memory.connect(meeting.rank, size, tf_cluster.publish, _published, name, meeting.timeout_seconds)


def _published(key: str, seconds: float) -> str:
    return tf_cluster.published(key, max(1, int(1000 * seconds)))


CANDIDATES: Mapping[str, Candidate] = {
    "gloo": Candidate(
        lambda meeting: gloo.why_not(meeting.rank, meeting.addresses),
        lambda meeting, members: gloo.connect(
            meeting.rank, meeting.addresses, members, tf_cluster.publish, _published, f"{meeting.name}/gloo"
        ),
        across_hosts=True,
    ),
    "mpi": Candidate(
        lambda meeting: mpi.why_not(len(meeting.workers)),
        lambda meeting, members: mpi.connect(meeting.rank, len(meeting.workers), members),
        across_hosts=True,
    ),
    "shared_memory": Candidate(lambda _: "", _share_memory),
}


def choose(
    strategy: Any, workers: Sequence[str], addresses: Sequence[str], rank: int, wanted: str, timeout_seconds: float
) -> tuple[str, Communicator]:
    """Returns the name of the transport, and the communicator. A collective.

    Args:
        strategy: Of the workers of a cluster.
        workers: Their names.
        addresses: `host:port` of each.
        rank: This one's number.
        wanted: `strategy.transport`.
        timeout_seconds: How long an exchange may take; 0 means for ever.

    Raises:
        ConfigError: What is wanted cannot be used, by any of the workers, or they want different ones. It is raised on all.
    """
    ranks = Ranks(strategy, rank, len(workers))
    numbers = ranks.gather(TRANSPORTS.index(wanted), random.SystemRandom().randrange(2**31)).astype(int)
    wishes = {TRANSPORTS[wish] for wish in numbers[:, 0]}
    if len(wishes) > 1:
        raise ConfigError(
            f"strategy.transport must be the same for all workers. Received: {', '.join(sorted(wishes))}."
        )
    devices = strategy.extended.worker_devices
    if wanted in TENSORFLOW_TRANSPORTS or ranks.size == 1:
        own = "nccl" if "GPU" in devices[0] else "grpc"
        return wanted if wanted in ("grpc", "nccl") else own, CrossProcessCommunicator(strategy)
    meeting = Meeting(f"tfdist/transport/{numbers[0, 1]}", rank, workers, addresses, timeout_seconds)
    candidate, transport, way = CANDIDATES[wanted], None, wanted
    unfit = _DEVICES if len(devices) > 1 or "GPU" in devices[0] else candidate.why_not(meeting)
    reason = _first_reason(ranks, meeting, "fit", unfit)
    if not reason:
        try:
            transport, way = _connect(ranks, meeting, wanted)
        except NoTransportError as e:
            unfit = str(e)
        reason = _first_reason(ranks, meeting, "connected", unfit)
    if reason or transport is None:
        raise ConfigError(f"strategy.transport={wanted} is not possible: {reason}. Use strategy.transport=grpc.")
    communicator = BufferedCommunicator(strategy, transport, timeout_seconds)
    atexit.register(_end, communicator)
    if ranks.is_chief:
        logger.info(f"gradients travel by {way}.")
    return wanted, communicator


def _connect(ranks: Ranks, meeting: Meeting, wanted: str) -> tuple[BufferTransport | None, str]:
    """Returns the transport, in two levels where that saves bytes, and how to name it. A collective."""
    candidate = CANDIDATES[wanted]
    keys = _texts(ranks, meeting, "host", shared_memory_rendezvous.host_key()) if candidate.across_hosts else []
    if two_level.saves(hosts := two_level.group(keys)):
        store = (tf_cluster.publish, _published, f"{meeting.name}/local")
        transport, reason = two_level.connect(
            *(meeting.rank, hosts, *store, meeting.timeout_seconds),
            agree=lambda mine: _first_reason(ranks, meeting, "local", mine),
            connect_leaders=lambda leaders: candidate.connect(meeting, leaders),
        )
        if transport:
            return transport, f"{wanted} between {len(hosts)} hosts, and by shared memory within"
        if ranks.is_chief:
            logger.info(f"workers of one host cannot share memory, and exchange gradients by {wanted}, too: {reason}.")
    return candidate.connect(meeting, range(ranks.size)), wanted


def _first_reason(ranks: Ranks, meeting: Meeting, what: str, mine: str) -> str:
    """Returns the first worker's text that is not empty, and whose it is unless it is all workers'. A collective."""
    texts = _texts(ranks, meeting, what, mine)
    first = next(filter(None, texts), "")
    who = [worker for worker, text in zip(meeting.workers, texts, strict=True) if text == first]
    return first if len(who) == ranks.size else f"{first} ({truncate(', '.join(who))})"


def _texts(ranks: Ranks, meeting: Meeting, what: str, mine: str) -> list[str]:
    """Returns the texts of all workers. A collective."""
    key = f"{meeting.name}/{what}"
    tf_cluster.publish(f"{key}/{ranks.rank}", f"{mine} ")
    ranks.barrier()
    milliseconds = int(1000 * _MEETING_SECONDS)
    return [tf_cluster.published(f"{key}/{rank}", milliseconds)[:-1] for rank in range(ranks.size)]


def _end(communicator: BufferedCommunicator) -> None:
    """Ends a transport, unless the others may not do so, too: then this process ends as it is."""
    code = exit_status.expected_exit_code()
    alone = code == 0 and exit_status.amid_training
    if communicator.calls.ended or alone or code not in (0, exit_status.PREEMPTED):
        return
    try:
        communicator.calls(communicator.transport.close, _END_SECONDS)
    except ClusterError:  # another one does not come: a library might wait for it even as the process ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except Exception as e:  # when all is done
        logger.warning(f"the exchange of gradients did not end in order: {told(e)}")
    communicator.calls.abort("the exchange of gradients has ended.")
